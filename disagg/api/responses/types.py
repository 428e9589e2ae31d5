"""The body of a request, as far as one field can be judged by itself.

What has no meaning here, and changes nothing of an answer, is accepted: clients send it to every server.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from disagg.api.types import SampledFields, StructuredOutputs


class InputPart(Struct, kw_only=True):
    type: str
    text: str | None = None


class InputItem(Struct, kw_only=True):
    """A message (also without ``type``), a ``function_call`` of an earlier answer, a ``function_call_output``, ``reasoning``."""

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class FunctionTool(Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolName(Struct, kw_only=True):
    type: str
    name: str | None = None


class TextFormat(Struct, kw_only=True, omit_defaults=True):
    """``text``, ``json_object``, or ``json_schema`` with a name and a schema."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class EventOptions(Struct, kw_only=True):
    include_obfuscation: bool | None = None


class ReasoningConfig(Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class ResponsesBody(SampledFields, kw_only=True):
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    stream_options: EventOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    text: TextConfig | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: str | ToolName | None = None
    parallel_tool_calls: bool | None = None

    # Given back with the answer, and nothing else.
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Accepted: nothing is stored, models have no effort to be told of, and there is one tier and no tool of the server's own.
    store: bool | None = None
    reasoning: ReasoningConfig | None = None
    service_tier: str | None = None
    max_tool_calls: int | None = None

    # Refused unless empty.
    truncation: str | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
