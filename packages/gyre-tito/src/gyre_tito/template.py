"""Chat templates (Jinja) as model folders ship them, rendered the way the ecosystem expects.

Follows the conventions that templates rely on: a sandbox, trimmed blocks, loop controls, `tojson` that keeps unicode,
`raise_exception` and `strftime_now`, special tokens as variables. Renders text; encodes nothing.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class TemplateRefusedError(ValueError):
    """The template does not accept these messages; the message is the template's own."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for other tools; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 prescribes

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._template = environment.from_string(source)
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: Callable[[str], str] | None = None,
        **more: Any,
    ) -> str:
        """Text of `messages`. `now` replaces the clock behind `strftime_now`. Error: `TemplateRefusedError`."""
        values: dict[str, Any] = {**self._variables, **more}
        if now is not None:
            values["strftime_now"] = now
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except jinja2.TemplateError as error:
            raise TemplateRefusedError(f"the model's chat template refused the messages: {error}") from error


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> str:
    raise TemplateRefusedError(f"the model's chat template refused the messages: {message}")


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
