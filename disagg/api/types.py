"""The bodies of requests, as far as one field can be judged by itself.

Unknown fields are ignored, with a line in the debug log; NaN, Infinity and numbers out of range are refused by the decoder.
Fields that must be absent because they are not supported are typed loosely here and refused with a sentence in ``validate``.
Words with few legal values are plain strings: msgspec would quote a wrong one in full.
"""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any, TypeVar

import msgspec
import structlog
from msgspec import Meta, Struct

from disagg.errors import InvalidRequestError
from disagg.request import FIRST_PRIORITY, LAST_PRIORITY

log = structlog.get_logger(__name__)

MAX_CHOICES = 128
"""Choices of one client request: prompts × n."""


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Struct, kw_only=True):
    """``strict`` changes nothing: what is sent is always valid under the schema, or refused."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, kw_only=True):
    """One of these. ``json`` is a schema, also as text; ``grammar`` is in Lark's notation or llama.cpp's."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SampledFields(Struct, kw_only=True):
    """What every endpoint that generates understands: how tokens are drawn, and where the answer ends."""

    model: str | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=FIRST_PRIORITY, le=LAST_PRIORITY)] | None = None  # lower ones are served first
    user: str | None = None  # for the client's own books


class SharedFields(SampledFields, kw_only=True):
    """What completions and chats both understand besides."""

    max_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    timings: bool | None = None  # ours: where the time went, with the last token

    # The form of the answer: one of these at most.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None  # older names of the fields of structured_outputs
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionBody(SharedFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None  # refused unless empty


class ContentPart(Struct, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Function(Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    type: str
    function: Function


class FunctionName(Struct, kw_only=True):
    name: str


class NamedTool(Struct, kw_only=True):
    type: str
    function: FunctionName


class ChatBody(SharedFields, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    # Refused unless empty.
    functions: Any = None
    function_call: Any = None
    chat_template: Any = None


class TokenizeBody(Struct, kw_only=True):
    """A prompt; or messages, with every other field that shapes a chat's prompt (``ChatBody`` reads those)."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


Body = TypeVar("Body", bound=Struct)

_PLACE = re.compile(r"(?P<what>.*) - at (?:`key` in )?`\$\.?(?P<param>[^`]*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<param>\w+)`")


def parse_body(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """The typed body. Raises InvalidRequestError with a short sentence that quotes nothing of what was sent."""
    try:
        typed = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from error
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply", code="invalid_json") from error
    if log.is_enabled_for(logging.DEBUG):
        _log_unknown(body, typed)
    return typed


def _log_unknown(body: bytes, typed: Struct) -> None:
    """Say which fields did nothing: whoever wonders why a parameter has no effect finds it here."""
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:  # a name that is not UTF-8, which the typed decoder passes over
        return
    if unknown := sorted(given.keys() - set(typed.__struct_fields__)):
        log.debug("unknown fields ignored", body=type(typed).__name__, fields=[name[:40] for name in unknown[:20]])


def _field_error(text: str) -> InvalidRequestError:
    param = None
    if place := _PLACE.fullmatch(text):
        text, param = place["what"], place["param"] or None
    missing = _MISSING.match(text)
    if missing:
        param = f"{param}.{missing['param']}" if param else missing["param"]
        text = "this field is required"
    text = text.replace(" | null", "").replace("`", "")
    return InvalidRequestError(f"{param}: {text}" if param else text, param=param, code="invalid_value")
