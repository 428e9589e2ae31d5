"""A Responses body as the chat that it is, and what is wrong with that chat in the words of the body.

An answer's items come back as input, item by item; a chat has them in one message of the assistant: its text, then its calls.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from disagg.api.responses.types import FunctionTool, InputItem, InputPart, ResponsesBody, TextFormat, ToolName
from disagg.api.types import (
    ChatBody,
    ChatMessage,
    ContentPart,
    Function,
    FunctionName,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    SampledFields,
    Tool,
)
from disagg.api.validate import invalid, unsupported
from disagg.errors import InvalidRequestError

LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (  # what else is documented belongs to items that no answer has here
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
)
_ROLES = ("system", "developer", "user", "assistant")
_RENAMED = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?")


class Chat(NamedTuple):
    body: ChatBody
    places: list[list[str]]
    """Of each message: the input that its content came from, then that of each of its calls."""


def as_chat(body: ResponsesBody) -> Chat:
    """Raises InvalidRequestError for what no chat can be asked for, naming the field of ``body``."""
    _check_unsupported(body)
    has_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not has_logprobs:
        raise invalid("top_logprobs", f"only allowed with include: [{LOGPROBS}]")
    messages, places = _messages(body)
    chat = ChatBody(
        **{name: getattr(body, name) for name in SampledFields.__struct_fields__},
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=has_logprobs,
        top_logprobs=body.top_logprobs,
        response_format=None if body.text is None or body.text.format is None else _format(body.text.format),
        structured_outputs=body.structured_outputs,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=None if body.tools is None else [_tool(index, tool) for index, tool in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice) if isinstance(body.tool_choice, ToolName) else body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
    )
    return Chat(chat, places)


def in_own_words(error: InvalidRequestError, places: list[list[str]]) -> InvalidRequestError:
    """``error``, raised for the chat, as it has to be told to who sent the Responses body."""
    message, param = str(error), error.param or ""
    if place := _MESSAGE.match(message):
        old, param = place[0], places[int(place[1])][int(place[2] or -1) + 1]
    else:
        old, param = param, own_name(param)
    if old and message.startswith(old):
        message = param + message[len(old) :]
    return InvalidRequestError(message, param=param or None, code=error.code, status=error.status)


def own_name(param: str) -> str:
    """The body's name of a chat's field."""
    return _RENAMED.get(param, param.replace(".function.", "."))


def _check_unsupported(body: ResponsesBody) -> None:
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise unsupported(name, "this server keeps no responses; send the earlier items as input")
    if body.prompt is not None:
        raise unsupported("prompt", "this server keeps no prompts; send instructions and input")
    if body.background:
        raise unsupported(
            "background", "answers are not made in the background; leave it out, and use stream: true for long ones"
        )
    if body.truncation == "auto":
        raise unsupported("truncation", "auto is not supported; leave out earlier items yourself where the input is too long")
    if body.truncation not in (None, "disabled"):
        raise invalid("truncation", "must be disabled")
    if body.stream_options is not None:
        if not body.stream:
            raise invalid("stream_options", "only allowed with stream: true")
        if body.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", "events are sent as they are; send false or leave it out")
    for index, name in enumerate(body.include or ()):
        if name not in _INCLUDABLE:
            raise invalid(f"include[{index}]", f"must be one of {', '.join(_INCLUDABLE)}")


def _messages(body: ResponsesBody) -> tuple[list[ChatMessage], list[list[str]]]:
    messages: list[ChatMessage] = []
    places: list[list[str]] = []

    def add(place: str, message: ChatMessage) -> None:
        messages.append(message)
        places.append([place])

    if body.instructions:
        add("instructions", ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        add("input", ChatMessage(role="user", content=body.input))
        return messages, places
    for index, item in enumerate(body.input):
        place = f"input[{index}]"
        match item.type or "message":
            case "message":
                if item.role not in _ROLES:
                    raise invalid(f"{place}.role", f"must be one of {', '.join(_ROLES)}")
                add(place, ChatMessage(role=item.role, content=_content(f"{place}.content", item.content)))
            case "function_call":
                if not messages or messages[-1].role != "assistant":
                    add(place, ChatMessage(role="assistant"))
                call = {"name": _required(place, item, "name"), "arguments": _required(place, item, "arguments")}
                entry = {"id": _required(place, item, "call_id"), "type": "function", "function": call}
                messages[-1].tool_calls = calls = messages[-1].tool_calls or []
                calls.append(entry)
                places[-1].append(f"{place}.arguments")
            case "function_call_output":
                call_id = _required(place, item, "call_id")
                add(place, ChatMessage(role="tool", tool_call_id=call_id, content=_content(f"{place}.output", item.output)))
            case "reasoning":
                pass  # it is for the model that had the thoughts
            case "item_reference":
                raise unsupported(place, "this server keeps no items; send the item itself")
            case _:
                sentence = "only message, function_call, function_call_output and reasoning are supported"
                raise unsupported(f"{place}.type", sentence)
    if not messages:
        raise invalid("input", "there is no message in it")
    return messages, places


def _required(place: str, item: InputItem, name: str) -> str:
    value: str | None = getattr(item, name)
    if value is None:
        raise invalid(f"{place}.{name}", "this field is required")
    return value


def _content(place: str, content: str | list[InputPart] | None) -> str | list[ContentPart]:
    if content is None:
        raise invalid(place, "this field is required")
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type not in ("input_text", "output_text") or part.text is None:
            raise unsupported(f"{place}[{index}]", "only parts with type input_text or output_text and a text are supported")
        texts.append(part.text)
    return texts[0] if len(texts) == 1 else [ContentPart(type="text", text=text) for text in texts]


def _tool(index: int, tool: FunctionTool) -> Tool:
    if tool.type != "function":
        raise unsupported(f"tools[{index}].type", "only tools of type function are supported")
    if tool.name is None:
        raise invalid(f"tools[{index}].name", "this field is required")
    function = Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return Tool(type="function", function=function)


def _tool_choice(asked: ToolName) -> NamedTool:
    if asked.type != "function" or asked.name is None:
        raise unsupported("tool_choice", "must be none, auto, required, or an object with type function and a name")
    return NamedTool(type="function", function=FunctionName(name=asked.name))


def _format(asked: TextFormat) -> ResponseFormat:
    if asked.type != "json_schema":
        return ResponseFormat(type=asked.type)
    for name in ("name", "schema"):
        if getattr(asked, name) is None:
            raise invalid(f"text.format.{name}", "this field is required")
    return ResponseFormat(
        type="json_schema",
        json_schema=JsonSchema(name=asked.name, description=asked.description, schema=asked.schema, strict=asked.strict),
    )
