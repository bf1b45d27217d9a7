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
_EMPTY_FIELDS = ("tool_calls", "tool_call_id", "function_call", "refusal", "audio", "annotations")
"""Fields that clients send back empty when they repeat an answer as history."""


def served_messages(messages: list[Any]) -> list[Any]:
    """The messages without empty fields that mean nothing; everything else as it was.

    Raises InvalidRequest for content that is not text, and for functions in the form that tools have replaced. What is
    no message at all is left for others.
    """
    return [
        _served(message, f"messages[{i}]") if isinstance(message, dict) else message
        for i, message in enumerate(messages)
    ]


def _served(message: dict[str, Any], path: str) -> dict[str, Any]:
    if message.get("role") == "function":
        raise _no("the role 'function' is not supported; it is 'tool' now", f"{path}.role")
    if message.get("function_call"):
        raise _no("function_call is not supported; it is tool_calls now", f"{path}.function_call")
    content = message.get("content")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            what = _PARTS.get(kind, f"parts of the type {kind!r} are")
            raise _no(f"{what} not supported, only text", f"{path}.content[{i}]")
    return {name: value for name, value in message.items() if value or name not in _EMPTY_FIELDS}


def _no(why: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {why}", param=param)
