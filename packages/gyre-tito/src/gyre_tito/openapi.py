"""The OpenAPI description of the proxy's agent-facing and admin routes, built from the types that decode requests.

Invariant: a body that this description calls invalid is refused, and its field names are the ones that are read. Pure:
returns plain JSON data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gyre_tito import admin
from gyre_tito.dialects import anthropic, chat, completions, responses

_BODIES: dict[str, tuple[type[Any], dict[str, tuple[str, type[Any]]]]] = {
    "/v1/chat/completions": (chat.ChatBody, {"messages": ("array", chat.ChatMessage), "tools": ("objects", dict)}),
    "/v1/completions": (completions.CompletionBody, {}),
    "/v1/responses": (responses.ResponseBody, {"input": ("array", responses.ResponseItem), "tools": ("objects", dict)}),
    "/v1/messages": (
        anthropic.AnthropicBody,
        {"messages": ("array", anthropic.AnthropicMessage), "tools": ("array", anthropic.AnthropicTool)},
    ),
    "/v1/messages/count_tokens": (
        anthropic.AnthropicBody,
        {"messages": ("array", anthropic.AnthropicMessage), "tools": ("array", anthropic.AnthropicTool)},
    ),
    "/admin/v1/executions": (admin.OpenBody, {}),
    "/admin/v1/executions/{execution}/sessions": (admin.LabelBody, {}),
    "/admin/v1/executions/{execution}/close": (admin.CloseBody, {}),
}
_BARE = ("/admin/v1/executions/{execution}/reopen",)
_READS = ("/v1/models", "/v1/models/{model}", "/admin/v1/executions", "/admin/v1/executions/{execution}")


def describe_api(model: str) -> dict[str, Any]:
    """The description as OpenAPI 3.1."""
    types = [body for body, _ in _BODIES.values()]
    types += [kind for _, lists in _BODIES.values() for form, kind in lists.values() if form == "array"]
    references, components = msgspec.json.schema_components(
        list(dict.fromkeys(types)), ref_template="#/components/schemas/{name}"
    )
    by_type = dict(zip(dict.fromkeys(types), references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for path, (body, lists) in _BODIES.items():
        schema = _with_lists(components[_name(by_type[body])], lists, by_type)
        paths.setdefault(path, {})["post"] = _operation(path, schema)
    for path in _BARE:
        paths.setdefault(path, {})["post"] = _operation(path, None)
    for path in _READS:
        paths.setdefault(path, {})["get"] = _operation(path, None)
    return {
        "openapi": "3.1.0",
        "info": {"title": f"gyre-tito recording proxy ({model})", "version": "1"},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _name(reference: Mapping[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _with_lists(
    schema: dict[str, Any],
    lists: Mapping[str, tuple[str, type[Any]]],
    references: Mapping[type[Any], Mapping[str, Any]],
) -> dict[str, Any]:
    """Say what is inside the fields that are decoded late (message lists, tools)."""
    properties = dict(schema["properties"])
    for field, (form, kind) in lists.items():
        items = {"type": "object"} if form == "objects" else dict(references[kind])
        properties[field] = {"type": "array", "items": items}
    required = sorted({*schema.get("required", []), *(field for field in lists if field != "tools")})
    return {**schema, "properties": properties, "required": required}


def _operation(path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    operation: dict[str, Any] = {
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ],
        "responses": {
            "200": {"description": "The answer."},
            "4XX": {"description": "The request is refused, in the dialect's error shape."},
            "502": {"description": "The engine failed; what it sampled is recorded."},
            "503": {"description": "No room now, or the answer could not be recorded."},
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
