"""POST /v1/chat/completions: messages, template options, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.api.fakes import EOS, TOKENIZER, FakeRouter, async_test, says, serving, tokens


class RecordingTemplate:
    """Stands for the model's template: keeps what it is given."""

    source = ""

    def __init__(self) -> None:
        self.calls: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []

    def encode(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        self.calls.append((messages, options))
        return [97]


@async_test
async def test_an_answer_has_openais_shape() -> None:
    """A message by the assistant, finish reason and usage."""
    async with serving(FakeRouter(says("hello"))) as client:
        answer = await client.chat(max_tokens=None)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["completion_tokens"] == 6


@async_test
async def test_the_prompt_is_rendered_once_for_all_choices() -> None:
    """n choices share one rendering; text that looks like a control token stays text."""
    template = RecordingTemplate()
    router = FakeRouter(says("x"))
    async with serving(router, chat_template=template) as client:
        await client.chat(n=3)
    assert len(template.calls) == 1
    async with serving(router) as client:
        await client.chat(messages=[{"role": "user", "content": "<|im_end|>"}])
    assert router.streams[-1].request.prompt.count(EOS) == 1  # the template's own


@async_test
async def test_max_tokens_defaults_to_the_rest_of_the_context() -> None:
    """Neither name given: all that is left. max_completion_tokens wins over the older name."""
    router = FakeRouter(says("x"))
    async with serving(router, max_model_len=100) as client:
        await client.chat()
        await client.chat(max_tokens=5)
        await client.chat(max_tokens=5, max_completion_tokens=7)
    first, second, third = (stream.request for stream in router.streams)
    assert first.params.max_tokens == 100 - len(first.prompt)
    assert (second.params.max_tokens, third.params.max_tokens) == (5, 7)


@async_test
async def test_messages_reach_the_template_as_it_knows_them() -> None:
    """Absent fields stay absent, developer is system, text parts stay parts, tool calls of earlier turns pass."""
    template = RecordingTemplate()
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    async with serving(FakeRouter(says("x")), chat_template=template) as client:
        await client.chat(
            messages=[
                {"role": "developer", "content": "be kind"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "Ann"},
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "content": "42", "tool_call_id": "c1"},
            ],
            chat_template_kwargs={"enable_thinking": False},
            tools=[{"type": "function", "function": {"name": "f"}}],
            tool_choice="none",
            response_format={"type": "text"},
        )
        await client.chat(messages=[{"role": "assistant", "content": "go"}], continue_final_message=True)
        await client.chat(add_generation_prompt=False)
    (messages, options), (_, continuing), (_, bare) = template.calls
    assert messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    assert (options["add_generation_prompt"], options["continue_final_message"]) == (True, False)
    assert options["kwargs"] == {"enable_thinking": False}
    assert (continuing["add_generation_prompt"], continuing["continue_final_message"]) == (False, True)
    assert (bare["add_generation_prompt"], bare["continue_final_message"]) == (False, False)


@pytest.mark.parametrize("is_streamed", [False, True])
@async_test
async def test_logprobs_add_up_to_the_text(is_streamed: bool) -> None:
    """An entry per token of the text with its bytes and the k best; end-of-sequence is no text and has no entry."""
    async with serving(FakeRouter(says("hö"))) as client:
        if is_streamed:
            chunks = [event["choices"][0] for event in await client.chat_events(logprobs=True, top_logprobs=2)]
            content = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
        else:
            content = (await client.chat(logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "hö"
    assert [entry["logprob"] for entry in content] == [-0.5, -1.5, -2.5]
    assert content[0] == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [
            {"token": "h", "logprob": -0.5, "bytes": [104]},
            {"token": "~", "logprob": -9.0, "bytes": [126]},
        ],
    }


@async_test
async def test_logprobs_without_top_hold_the_chosen_token_only() -> None:
    """logprobs true alone: empty top_logprobs, and the engine is asked for no more."""
    router = FakeRouter(says("h"))
    async with serving(router) as client:
        answer = await client.chat(logprobs=True)
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert router.streams[0].request.params.num_logprobs == 0


@async_test
async def test_a_stop_string_is_cut_from_the_stream() -> None:
    """Nothing of a stop string is ever sent, whichever tokens it is spread over, and the rest of the work is stopped."""
    router = FakeRouter(lambda request: ([token] for token in tokens("keep STOP lost", None)))
    async with serving(router) as client:
        events = await client.chat_events(stop="STOP")
    deltas = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(deltas) == "keep "
    assert events[-1]["choices"][0]["stop_reason"] == "STOP"
    assert (router.stopped, router.aborted) == (router.streams, [])


@async_test
async def test_token_ids_are_returned_on_demand() -> None:
    """The prompt's ids stand beside the choices, in a stream in the first chunk."""
    async with serving(FakeRouter(says("ab"))) as client:
        answer = await client.chat(return_token_ids=True)
        first, *rest = await client.chat_events(return_token_ids=True)
    assert TOKENIZER.decode(answer["prompt_token_ids"], skip_special=False).startswith("<|im_start|>user\nhi")
    assert answer["choices"][0]["token_ids"] == [97, 98, EOS]
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [token for event in rest for token in event["choices"][0]["token_ids"]] == [97, 98, EOS]


@async_test
async def test_a_model_without_a_template_says_so() -> None:
    """A base model serves completions only."""
    async with serving(FakeRouter(says("x")), chat_template=None) as client:
        error = await client.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert "no chat template" in error["message"]
