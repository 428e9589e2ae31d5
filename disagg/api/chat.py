"""POST /v1/chat/completions: messages, rendered by the model's own chat template."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from disagg.api.chunks import Calls, Chunks, Shape
from disagg.api.generate import serve
from disagg.api.logprobs import chat_logprobs
from disagg.api.read import read
from disagg.api.services import Services
from disagg.api.structured import requested_form
from disagg.api.tools import ToolUse, requested_tools, whole_calls
from disagg.api.types import ChatBody, ChatMessage, parse_body
from disagg.api.validate import (
    Answer,
    Work,
    build_work,
    check_num_choices,
    check_shared,
    invalid,
    mint_id,
    unsupported,
)

_ROLES = ("system", "developer", "user", "assistant", "tool")
_NOT_FOR_TEMPLATES = {"chat_template", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message"}

decoder = msgspec.json.Decoder(ChatBody)


def _whole(text: str, calls: Calls) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message |= {"content": text or None, "tool_calls": whole_calls(calls)}
    return {"message": message}


def _piece(text: str, calls: Calls) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": text} if text else {}
    return {"delta": delta | {"tool_calls": calls} if calls else delta}


_SHAPE = Shape(
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    whole=_whole,
    piece=_piece,
    opening={"delta": {"role": "assistant", "content": ""}},
    logprobs=chat_logprobs,
    has_prompt_ids_in_choice=False,
)


async def chat_completions(http: web.Request) -> web.StreamResponse:
    return await serve(http, await read(http, plan), partial(Chunks, _SHAPE))


def plan(raw: bytes, services: Services) -> Work:
    """The body's requests. Raises InvalidRequestError. Pure, and slow for a long prompt."""
    return work_of(mint_id("chatcmpl"), parse_body(raw, decoder), services)


def work_of(id: str, body: ChatBody, services: Services) -> Work:
    """As ``plan``, for endpoints whose own bodies become a chat's."""
    check_shared(body, services)
    _check_unsupported(body)
    check_num_choices(1, body.n or 1)
    if body.max_tokens == 0:
        raise invalid("max_tokens", "must be at least 1")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "only allowed with logprobs: true")
    form, tools = requested_form(body, is_supported=services.forms is not None), tools_of(body, services)
    if tools is not None:
        tools = tools if form is None else tools.beside(form)
        form = tools.form
    answer = Answer(
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        default_max_tokens=None,
        prompt_field="messages",
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        continues=bool(body.continue_final_message),
        form=form,
        tools=tools,
    )
    return build_work(id, body, services, [render(body, services, tools)], answer)


def tools_of(body: ChatBody, services: Services) -> ToolUse | None:
    """The tools that the answer may call, which the prompt shows. Raises InvalidRequestError."""
    source = services.chat_template.source if services.chat_template is not None and body.tools else None
    return requested_tools(body, services.tools, source, can_force=services.forms is not None)


def render(body: ChatBody, services: Services, tools: ToolUse | None) -> list[int]:
    """The prompt's token ids: rendered and tokenised once, whatever n is."""
    if services.chat_template is None:
        raise unsupported("messages", "this model has no chat template; use /v1/completions")
    if body.chat_template is not None:
        raise unsupported("chat_template", "templates come with the model and cannot be sent")
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise invalid("continue_final_message", "not allowed together with add_generation_prompt")
    if continues and body.messages[-1].role != "assistant":
        raise invalid("continue_final_message", "the last message must be the assistant's")
    kwargs = body.chat_template_kwargs or {}
    if refused := _NOT_FOR_TEMPLATES.intersection(kwargs):
        raise invalid("chat_template_kwargs", f"{min(refused)} cannot be given to the template")
    return services.chat_template.encode(
        [_message(index, message) for index, message in enumerate(body.messages)],
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        kwargs=kwargs,
        max_tokens=services.max_model_len,
        **({} if tools is None else {"tools": tools.offered}),
    )


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    """The message as templates know it: a dict without the absent fields."""
    place = f"messages[{index}]"
    if message.role not in _ROLES:
        raise invalid(f"{place}.role", f"must be one of {', '.join(_ROLES)}")
    if message.content is None and message.role != "assistant":
        raise invalid(f"{place}.content", "this field is required")
    fields: dict[str, Any] = {
        # Templates older than the word know only its predecessor, and some raise at a role that they do not know.
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content,
    }
    if isinstance(message.content, list):
        for part_index, part in enumerate(message.content):
            if part.type != "text" or part.text is None:
                raise unsupported(f"{place}.content[{part_index}]", "only parts with type text and a text are supported")
        fields["content"] = [{"type": "text", "text": part.text} for part in message.content]
    optional = {"name": message.name, "tool_calls": message.tool_calls, "tool_call_id": message.tool_call_id}
    return fields | {name: value for name, value in optional.items() if value is not None}


def _check_unsupported(body: ChatBody) -> None:
    if body.functions or body.function_call not in (None, "none", "auto"):
        raise unsupported("functions", "functions are not supported")
