"""The answer as types, as in ``disagg.api.answer_types``: for ``/openapi.json`` and the tests, never on a request's path."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from disagg.api.answer_types import LoggedChatToken
from disagg.api.responses.types import FunctionTool, ReasoningConfig, TextConfig, ToolName

Status = Literal["completed", "incomplete", "failed", "in_progress"]
ItemStatus = Literal["completed", "incomplete", "in_progress"]


class OutputText(Struct, kw_only=True):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[LoggedChatToken]


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputCall(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """Its result goes back with the same ``call_id``."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class InputTokensDetails(Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct, kw_only=True):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct, kw_only=True):
    code: str
    message: str


class Response(Struct, kw_only=True):
    """Beside the answer, what was asked for. Nothing is stored: the next request sends the items that it goes on from."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | OutputCall]
    usage: ResponseUsage | None  # null until the response has ended, and where it failed
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: TextConfig
    tool_choice: str | ToolName
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class ResponseEvent(Struct, kw_only=True):
    """``type`` is also the event's name, and says which of the other fields it has."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputMessage | OutputCall | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    logprobs: list[LoggedChatToken] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
