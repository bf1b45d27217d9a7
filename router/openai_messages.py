"""What OpenAI clients put into messages beside text: refused by name where it asks for something, else dropped.

Pure.
"""

from __future__ import annotations

from typing import Any

from tandem.errors import InvalidRequest

_PARTS = {
    "image_url": "images are",
    "input_image": "images are",
    "input_audio": "audio is",
    "file": "files are",
    "input_file": "files are",
    "refusal": "refusals are",
}
"""Kinds of content parts and what people call them."""
_TOOL_ROLES = ("tool", "function")
_TOOL_FIELDS = ("tool_calls", "tool_call_id", "function_call")
_EMPTY_FIELDS = (*_TOOL_FIELDS, "refusal", "audio", "annotations")
"""Fields that clients send back empty when they repeat an answer as history."""


def served_messages(messages: list[Any]) -> list[Any]:
    """The messages without empty fields that mean nothing; everything else as it was.

    Raises InvalidRequest for tools and for content that is not text. What is no message at all is left for others.
    """
    return [
        _served(message, f"messages[{i}]") if isinstance(message, dict) else message
        for i, message in enumerate(messages)
    ]


def _served(message: dict[str, Any], path: str) -> dict[str, Any]:
    if message.get("role") in _TOOL_ROLES:
        raise _no(f"tools are not supported, so messages of the role {message['role']!r} are not", f"{path}.role")
    for name in _TOOL_FIELDS:
        if message.get(name):
            raise _no("tools are not supported", f"{path}.{name}")
    content = message.get("content")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            what = _PARTS.get(kind, f"parts of the type {kind!r} are")
            raise _no(f"{what} not supported, only text", f"{path}.content[{i}]")
    return {name: value for name, value in message.items() if value or name not in _EMPTY_FIELDS}


def _no(why: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {why}", param=param)
