"""The answers as types: what ``/openapi.json`` promises, and what the tests hold every answer against.

Answers are written as plain dicts, which costs less for every token; these types never stand on a request's path. A field that
is UNSET by default is left out of an answer unless the request asked for it.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct, kw_only=True):
    cached_tokens: int


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(Struct, kw_only=True):
    """Milliseconds and tokens; the first nine as llama.cpp has them. Null where nothing was computed."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    queue_ms: float
    reserve_ms: float
    transfer_ms: float
    first_token_ms: float


class CompletionLogprobs(Struct, kw_only=True):
    """The first entry of an echoed prompt is null: nothing predicts it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None  # null in all chunks of a stream but the choice's last
    stop_reason: str | int | None  # the stop string or the client's own stop token
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """Also each chunk of a stream, which ends with one without choices if usage was asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


class FunctionCall(Struct, kw_only=True):
    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(Struct, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class LoggedTop(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class LoggedChatToken(LoggedTop, kw_only=True):
    top_logprobs: list[LoggedTop]


class ChatLogprobs(Struct, kw_only=True):
    content: list[LoggedChatToken]


class ChatChoice(Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class Delta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, kw_only=True):
    """A stream ends with one without choices if usage was asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Struct, kw_only=True):
    object: Literal["list"]
    data: list[Model]


class Tokenized(Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Struct, kw_only=True):
    prompt: str


class TokenizerInfo(Struct, kw_only=True):
    """The texts of the special tokens, null where the model has none, and the chat template's source."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    add_bos_token: bool
    model_max_length: int
    chat_template: str | None


class Health(Struct, kw_only=True):
    status: str
    reasons: list[str] | UnsetType = UNSET


class Version(Struct, kw_only=True):
    version: str


class Status(Struct, kw_only=True):
    """The fields that every state has; ``disagg status`` shows them as a table."""

    run_id: str
    mode: str
    model: str
    draining: bool
    workers: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    requests: dict[str, int]


class ErrorObject(Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct, kw_only=True):
    """Every answer with a status of 400 and above."""

    error: ErrorObject
