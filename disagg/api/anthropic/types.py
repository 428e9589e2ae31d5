"""The bodies of requests, as far as one field can be judged by itself, and the answers that ``/openapi.json`` promises.

Fields that have no meaning here and change nothing of an answer are ignored: ``cache_control``, for one, because every prompt's
prefix is looked up in the cache and kept there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType


class TextPart(Struct, kw_only=True):
    type: str
    text: str | None = None


class InputBlock(Struct, kw_only=True):
    """``text``; ``tool_use`` with id, name and input; or ``tool_result`` with tool_use_id and content."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[TextPart] | None = None
    is_error: bool | None = None


class InputMessage(Struct, kw_only=True):
    role: str
    content: str | Annotated[list[InputBlock], Meta(min_length=1)]


class CustomTool(Struct, kw_only=True):
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Struct, kw_only=True):
    """``auto``, ``any``, ``tool`` with a name, or ``none``."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Struct, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Struct, kw_only=True):
    """``effort`` is accepted: there is only one."""

    effort: str | None = None
    format: OutputFormat | None = None


class Thinking(Struct, kw_only=True):
    type: str


class Metadata(Struct, kw_only=True):
    user_id: str | None = None


class CountTokensBody(Struct, kw_only=True):
    """What shapes the prompt."""

    model: str | None = None
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextPart] | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=2**31)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    metadata: Metadata | None = None


class MessageUsage(Struct, kw_only=True):
    """The whole prompt is the sum of the three counts of input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class ContentBlock(Struct, kw_only=True):
    """A text, or the use of a tool."""

    type: Literal["text", "tool_use"]
    text: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class Message(Struct, kw_only=True):
    """In a stream's first event the reason is null and there is no content yet."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class EventDelta(Struct, kw_only=True):
    type: Literal["text_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Struct, kw_only=True):
    """The data of an event that is called as its ``type``; the other fields are those of that type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ]
    message: Message | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: ContentBlock | UnsetType = UNSET
    delta: EventDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class TokenCount(Struct, kw_only=True):
    input_tokens: int


class MessagesErrorObject(Struct, kw_only=True):
    type: str
    message: str


class MessagesError(Struct, kw_only=True):
    """Every answer with a status of 400 and above, and the event that ends a stream which cannot go on."""

    type: Literal["error"]
    error: MessagesErrorObject
    request_id: str
