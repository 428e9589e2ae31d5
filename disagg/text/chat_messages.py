"""OpenAI's chat messages in the shape that chat templates are written for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from disagg.errors import InvalidRequestError

LONGEST_CONTROL_TOKEN = 256
"""Characters; far above any that exists."""


def template_messages(messages: list[dict[str, Any]], *, keep_parts: bool) -> list[dict[str, Any]]:
    """New messages: without null fields, tool-call arguments as objects, and text parts as one string unless ``keep_parts``.

    Raises InvalidRequestError for content that is not text and for tool-call arguments that are not JSON.
    """
    return [_message(message, f"messages[{i}]", keep_parts) for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str, keep_parts: bool) -> dict[str, Any]:
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        parts = [_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        message["content"] = parts if keep_parts else "\n".join(part["text"] for part in parts)
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message["tool_calls"])]
    return message


def _text_part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise InvalidRequestError(f"{where}: this model reads text parts only, not {str(kind)[:40]!r}", param="messages")
    return {"type": "text", "text": part["text"]}


def _tool_call(call: Any, where: str) -> Any:
    """On the wire the arguments are a JSON text; templates iterate over an object or print it as JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        raise InvalidRequestError(f"{where}: the arguments are not JSON: {error}", param="messages") from error
    return {**call, "function": {**function, "arguments": arguments}}


def map_strings(value: Any, change: Callable[[str, str], str]) -> Any:
    """``value`` with every string in it, at any depth and keys too, replaced by ``change(string, following)``.

    ``following`` is the beginning of what a template may write right after the string: the text parts that come next.
    """
    match value:
        case str():
            return change(value, "")
        case dict():
            return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
        case list() if all(isinstance(item, dict) and isinstance(item.get("text"), str) for item in value):
            parts, following = [], ""
            for part in reversed(value):
                parts.append({**map_strings(part, change), "text": change(part["text"], following)})
                following = (part["text"] + following)[:LONGEST_CONTROL_TOKEN]
            return parts[::-1]
        case list():
            return [map_strings(item, change) for item in value]
    return value
