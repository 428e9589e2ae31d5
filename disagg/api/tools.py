"""The fields ``tools``, ``tool_choice`` and ``parallel_tool_calls``, and calls as the chat endpoint writes them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from disagg.api.structured import Form, bounded, refused
from disagg.api.types import ChatBody, NamedTool, Tool
from disagg.errors import InvalidRequestError
from disagg.text.tools import CallDelta, ToolParser, ToolSupport, calls_grammar, takes_tools

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What one request may do with tools.

    ``form``: the answer is calls and nothing else; with ``is_either``, calls or what another form says.
    """

    offered: list[dict[str, Any]]  # as chat templates know them
    schemas: Mapping[str, dict[str, Any]]  # by name, of the arguments
    support: ToolSupport
    may_be_many: bool
    form: Form | None
    is_either: bool = False

    @property
    def markers(self) -> Mapping[int, str]:
        """Control tokens that belong to calls, with their texts."""
        return {token_id: text for text, token_id in self.support.marker_ids.items()}

    def parser(self) -> ToolParser:
        return ToolParser(self.support.form, self.schemas.keys(), is_either=self.is_either)

    def beside(self, form: Form) -> ToolUse:
        """The same, where an answer that is not calls must have ``form``. Raises InvalidRequestError.

        Calls that are forced leave the form nothing to say.
        """
        if self.form is not None:
            return self
        if not self.support.form.opening:
            message = "not together with tools: this model writes calls as bare JSON, which nothing tells from such an answer"
            raise _unsupported(form.param, f"{message}; send tool_choice none, required or a function")
        calls = self._calls()
        both = calls_grammar(self.support, self.schemas, may_be_many=self.may_be_many, other=form.grammar)
        return replace(self, form=bounded(Form(both, form.param, parts=(calls, form))), is_either=True)

    def _calls(self) -> Form:
        return bounded(Form(calls_grammar(self.support, self.schemas, may_be_many=self.may_be_many), "tools"))

    def told(self, request_id: str, delta: CallDelta) -> dict[str, Any]:
        """An entry of a chunk's ``tool_calls``: id, type and name come once, with the first of each call."""
        if delta.name is None:
            return {"index": delta.call, "function": {"arguments": delta.arguments}}
        # As unguessable as the request's own id, and the same however often it is asked for.
        digest = hashlib.blake2b(f"{request_id} {delta.call}".encode(), digest_size=16).hexdigest()
        form = self.support.form
        return {
            "index": delta.call,
            "id": form.id_prefix + digest[: form.id_length],
            "type": "function",
            "function": {"name": delta.name, "arguments": delta.arguments},
        }


def requested_tools(
    body: ChatBody, support: ToolSupport | None, template_source: str | None, *, can_force: bool
) -> ToolUse | None:
    """What the body asks for, None where no tool may be called. Raises InvalidRequestError. ``can_force``: by a grammar."""
    tools = {tool.function.name: tool for tool in body.tools or ()}
    _check_tools(body.tools or [])
    choice = _choice(body.tool_choice, tools)
    if not tools or choice == "none":
        return None
    if not takes_tools(template_source):
        raise _unsupported("tools", "this model's chat template has no place for tools")
    if support is None:
        raise _unsupported("tools", "how this model calls tools is unknown or switched off (the setting model.tool_parser)")
    is_forced = choice != "auto"
    if is_forced and not can_force:
        raise _unsupported("tool_choice", "only none and auto are supported by this server, which has no llguidance")
    may_be_many = body.parallel_tool_calls is not False and not isinstance(choice, Tool)
    use = ToolUse(
        offered=[msgspec.to_builtins(tool) for tool in tools.values()],
        schemas={tool.function.name: _schema(tool) for tool in ([choice] if isinstance(choice, Tool) else tools.values())},
        support=support,
        may_be_many=may_be_many,
        form=None,
    )
    return replace(use, form=use._calls()) if is_forced else use


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def _schema(tool: Tool) -> dict[str, Any]:
    return {**tool.function.parameters, "type": "object"} if tool.function.parameters else _NO_PARAMETERS


def _check_tools(tools: Sequence[Tool]) -> None:
    seen = set()
    for index, tool in enumerate(tools):
        place, name = f"tools[{index}]", tool.function.name
        if tool.type != "function":
            raise _unsupported(f"{place}.type", "only tools of type function are supported")
        if not _NAME.fullmatch(name):
            raise refused(f"{place}.function.name", "1 to 64 letters, digits, dots, dashes and underscores")
        if name in seen:
            raise refused(f"{place}.function.name", "two tools have this name")
        kind = (tool.function.parameters or {}).get("type", "object")
        if "object" not in (kind if isinstance(kind, list) else [kind]):
            raise refused(f"{place}.function.parameters", "arguments are an object: the schema's type must be object")
        seen.add(name)


def _choice(asked: str | NamedTool | None, tools: Mapping[str, Tool]) -> str | Tool:
    if isinstance(asked, NamedTool):
        if asked.type != "function" or asked.function.name not in tools:
            raise refused("tool_choice", "names no tool of this request")
        return tools[asked.function.name]
    if asked is not None and asked not in _CHOICES:
        raise refused("tool_choice", f"must be {', '.join(_CHOICES)} or a function of tools")
    if asked == "required" and not tools:
        raise refused("tool_choice", "required, but there are no tools")
    return asked or "auto"


def _unsupported(param: str, sentence: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {sentence}", param=param, code="unsupported_value")


def whole_calls(told: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that chunks' entries make together, as a message has them."""
    calls: list[dict[str, Any]] = []
    for entry in told:
        if "id" in entry:
            calls.append({"id": entry["id"], "type": "function", "function": dict(entry["function"])})
        else:
            calls[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]
    return calls
