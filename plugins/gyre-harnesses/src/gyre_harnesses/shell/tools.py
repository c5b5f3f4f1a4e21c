"""The agent's tools: how they are described to the model, how its arguments are read, and what a result looks like.

Invariant: whatever the model sends, the result is a text for the model; only an InfrastructureError or a cancellation
comes out as an exception. Results are at most `tool_output_bytes` of output plus one line of status.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gyre_core import ExecRequest, ExecResult, Workspace

_STRING = {"type": "string"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool's name, its default description and its arguments, all strings and all required."""

    name: str
    description: str
    arguments: tuple[str, ...]

    def schema(self, description: str) -> dict[str, Any]:
        """As chat completions take it."""
        parameters = {
            "type": "object",
            "properties": {name: dict(_STRING) for name in self.arguments},
            "required": list(self.arguments),
        }
        return {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": parameters},
        }


TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("bash", "Run a shell command in the workspace", ("command",)),
        Tool("read", "Read a file", ("path",)),
        Tool("write", "Create or replace a file", ("path", "content")),
        Tool("edit", "Replace the one place where old stands in a file by new", ("path", "old", "new")),
        Tool("task", "Give a part of the work to a sub-agent and get its answer", ("prompt",)),
    )
}


class ToolMistakeError(Exception):
    """The model used a tool wrongly; the text is for the model."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A readable call."""

    id: str
    name: str
    arguments: Mapping[str, str]


def schemas(names: Sequence[str], descriptions: Mapping[str, str]) -> list[dict[str, Any]]:
    """The `tools` of a request."""
    return [TOOLS[name].schema(descriptions.get(name, TOOLS[name].description)) for name in names]


def parse_call(raw: Mapping[str, Any], offered: Sequence[str]) -> ToolCall:
    """Read one of an answer's tool calls; ToolMistakeError says what is wrong with it."""
    function = raw.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in offered or not isinstance(function, Mapping):
        raise ToolMistakeError(f"error: no tool {name!r}; there are: {', '.join(offered)}")
    given = function.get("arguments")
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise ToolMistakeError(f"error: arguments of {name} are not JSON: {error}") from None
    wanted = TOOLS[name].arguments
    if not isinstance(arguments, Mapping) or set(arguments) != set(wanted):
        raise ToolMistakeError(f"error: {name} takes exactly: {', '.join(wanted)}")
    wrong = [key for key, value in arguments.items() if not isinstance(value, str)]
    if wrong:
        raise ToolMistakeError(f"error: {name}: {', '.join(wrong)} must be a string")
    return ToolCall(str(raw.get("id") or ""), name, arguments)


def describe(result: ExecResult) -> str:
    """A command's result as the model sees it."""
    text = (result.stdout + result.stderr).decode("utf-8", "replace").rstrip("\n")
    lines = [text] if text else []
    if result.dropped_bytes:
        lines.append(f"[cut: {result.dropped_bytes} more bytes]")
    if result.limit is not None:
        lines.append(f"[killed: {result.limit}]")
    elif result.exit_code:
        lines.append(f"[exit {result.exit_code}]")
    return "\n".join(lines) or "(no output)"


@dataclass(frozen=True, slots=True)
class FileTools:
    """bash, read, write and edit on one workspace."""

    workspace: Workspace
    shell: Sequence[str]
    output_bytes: int

    async def use(self, call: ToolCall, timeout_s: float) -> str:
        """The text that goes back to the model."""
        given = call.arguments
        try:
            match call.name:
                case "bash":
                    return await self._bash(given["command"], timeout_s)
                case "read":
                    return await self._read(given["path"])
                case "write":
                    data = given["content"].encode("utf-8", "surrogatepass")
                    await self.workspace.write(given["path"], data)
                    return f"wrote {len(data)} bytes"
                case _:
                    return await self._edit(given["path"], given["old"], given["new"])
        except OSError as error:
            return f"error: {error.strerror or error}"
        except (ValueError, RecursionError) as error:  # a path or a text that this host has no form for
            return f"error: {error}"

    async def _bash(self, command: str, timeout_s: float) -> str:
        if "\0" in command:
            return "error: the command holds a NUL byte"
        argv = [*self.shell, command.encode("utf-8", "replace").decode()]
        return describe(await self.workspace.run(ExecRequest(argv, timeout_s, self.output_bytes)))

    async def _read(self, path: str) -> str:
        data = await self.workspace.read(path, limit=self.output_bytes + 1)
        cut = "\n[cut]" if len(data) > self.output_bytes else ""
        text = data[: self.output_bytes].decode("utf-8", "replace").rstrip("\n")
        return text + cut or "(empty)"

    async def _edit(self, path: str, old: str, new: str) -> str:
        limit = 1 << 24
        data = await self.workspace.read(path, limit=limit + 1)
        if len(data) > limit:
            return "error: the file is too large to edit"
        before = old.encode("utf-8", "surrogatepass")
        found = data.count(before) if before else 0
        if found != 1:
            return f"error: old stands in {found} places, expected exactly one"
        await self.workspace.write(path, data.replace(before, new.encode("utf-8", "surrogatepass")))
        return "edited"
