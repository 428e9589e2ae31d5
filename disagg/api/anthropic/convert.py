"""A Messages body as the chat that it is, and what is wrong with that chat in the words of the body.

Anthropic's turns hold blocks where a chat has messages: the results of tools come in a turn of the user, and are messages of
their own; consecutive turns of one role are one turn. An answer to a turn of the assistant goes on in the middle of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from disagg.api.anthropic.types import CountTokensBody, CustomTool, InputBlock, InputMessage, TextPart, ToolChoice
from disagg.api.types import (
    ChatBody,
    ChatMessage,
    ContentPart,
    Function,
    FunctionName,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    Tool,
)
from disagg.api.validate import invalid, unsupported
from disagg.errors import InvalidRequestError

Value = TypeVar("Value")

_ROLES = ("user", "assistant", "system")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_RENAMED = {"stop": "stop_sequences", "response_format": "output_config.format", "continue_final_message": "messages"}


def as_chat(body: CountTokensBody, **sampling: Any) -> ChatBody:
    """``sampling``: the fields of the chat that do not shape the prompt. Raises InvalidRequestError, naming ``body``'s field."""
    if body.thinking is not None and body.thinking.type not in ("disabled", "adaptive"):
        raise unsupported("thinking", "this server's models do not think apart from their answer; send type: disabled")
    messages = _messages(body)
    choice = body.tool_choice
    return ChatBody(
        model=body.model,
        messages=messages,
        continue_final_message=messages[-1].role == "assistant",
        response_format=_response_format(body),
        tools=None if body.tools is None else [_tool(f"tools[{index}]", tool) for index, tool in enumerate(body.tools)],
        tool_choice=None if choice is None else _tool_choice(choice, has_tools=bool(body.tools)),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        **sampling,
    )


def in_own_words(error: InvalidRequestError) -> InvalidRequestError:
    """``error``, raised for the chat, as it has to be told to who sent the Messages body."""
    place, colon, rest = str(error).partition(": ")
    message = own_name(place) + colon + rest if colon else str(error)
    param = None if error.param is None else own_name(error.param)
    return InvalidRequestError(message, param=param, code=error.code, status=error.status)


def own_name(param: str) -> str:
    """The body's name of a chat's field."""
    return _RENAMED.get(param, param.replace(".function.", "."))


def _messages(body: CountTokensBody) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    if body.system:
        messages.append(ChatMessage(role="system"))
        for text in [body.system] if isinstance(body.system, str) else _texts("system", body.system):
            _add_text(messages[0], text)
    for index, message in enumerate(body.messages):
        place = f"messages[{index}]"
        if message.role not in _ROLES:
            raise invalid(f"{place}.role", f"must be one of {', '.join(_ROLES)}")
        for block_place, block in _blocks(place, message):
            _add(messages, message.role, block_place, block)
    if not messages:
        raise invalid("messages", "there is nothing in them for this model")
    last = messages[-1]
    if last.role == "assistant" and (last.tool_calls or not last.content):
        raise invalid("messages", "the last turn is the assistant's and has no text to go on with; send the user's after it")
    return messages


def _blocks(place: str, message: InputMessage) -> Iterator[tuple[str, InputBlock]]:
    if isinstance(message.content, str):
        yield f"{place}.content", InputBlock(type="text", text=message.content)
    else:
        yield from ((f"{place}.content[{index}]", block) for index, block in enumerate(message.content))


def _add(messages: list[ChatMessage], role: str, place: str, block: InputBlock) -> None:
    match block.type:
        case "text":
            _add_text(_turn(messages, role), _required(place, "text", block.text))
        case "tool_use" if role == "assistant":
            function = {"name": _required(place, "name", block.name), "arguments": _required(place, "input", block.input)}
            call = {"id": _required(place, "id", block.id), "type": "function", "function": function}
            turn = _turn(messages, role)
            if turn.tool_calls is None:
                turn.tool_calls = []
            turn.tool_calls.append(call)
        case "tool_result" if role == "user":
            call_id = _required(place, "tool_use_id", block.tool_use_id)
            messages.append(ChatMessage(role="tool", tool_call_id=call_id, content=_result(place, block)))
        case "thinking" | "redacted_thinking" if role == "assistant":
            pass  # it is for the model that had the thoughts
        case "tool_use" | "tool_result":
            raise invalid(f"{place}.type", f"a block of this type cannot stand in a turn of the {role}")
        case _:
            raise unsupported(f"{place}.type", "only blocks of type text, tool_use and tool_result are supported")


def _result(place: str, block: InputBlock) -> str:
    """Chat templates have no place for a flag, so that the text says it."""
    content = block.content or ""
    text = content if isinstance(content, str) else "\n".join(_texts(f"{place}.content", content))
    return f"Error: {text}" if block.is_error else text


def _texts(place: str, parts: list[TextPart]) -> list[str]:
    for index, part in enumerate(parts):
        if part.type != "text":
            raise unsupported(f"{place}[{index}].type", "only blocks of type text are supported here")
    return [_required(f"{place}[{index}]", "text", part.text) for index, part in enumerate(parts)]


def _turn(messages: list[ChatMessage], role: str) -> ChatMessage:
    """The message that goes on, or begins, where ``role`` speaks."""
    if not messages or messages[-1].role != role:
        messages.append(ChatMessage(role=role))
    return messages[-1]


def _add_text(message: ChatMessage, text: str) -> None:
    """One text is a string, as most clients of a chat send it; more are parts."""
    if not message.content:
        message.content = text
        return
    if isinstance(message.content, str):
        message.content = [ContentPart(type="text", text=message.content)]
    message.content.append(ContentPart(type="text", text=text))


def _required(place: str, name: str, value: Value | None) -> Value:
    if value is None:
        raise invalid(f"{place}.{name}", "this field is required")
    return value


def _tool(place: str, tool: CustomTool) -> Tool:
    if tool.type not in (None, "custom"):
        raise unsupported(f"{place}.type", "only tools of the client (type custom, with an input_schema) are supported")
    schema = _required(place, "input_schema", tool.input_schema)
    return Tool(type="function", function=Function(name=tool.name, description=tool.description, parameters=schema))


def _tool_choice(choice: ToolChoice, *, has_tools: bool) -> str | NamedTool:
    if choice.type not in (*_CHOICES, "tool"):
        raise invalid("tool_choice.type", f"must be one of {', '.join((*_CHOICES, 'tool'))}")
    if choice.type in ("any", "tool") and not has_tools:
        raise invalid("tool_choice", "there are no tools to choose from")
    if choice.type == "tool":
        name = _required("tool_choice", "name", choice.name)
        return NamedTool(type="function", function=FunctionName(name=name))
    return _CHOICES[choice.type]


def _response_format(body: CountTokensBody) -> ResponseFormat | None:
    asked = None if body.output_config is None else body.output_config.format
    if asked is None:
        return None
    if asked.type != "json_schema":
        raise invalid("output_config.format.type", "must be json_schema")
    schema = _required("output_config.format", "schema", asked.schema)
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema))
