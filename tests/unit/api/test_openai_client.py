"""The official Python client against the real surface: what it parses is what was meant."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from disagg.errors import OverloadedError
from disagg.request import FailReason
from tests.unit.api.fakes import MODEL, FakeRouter, async_test, says, serving, tokens

HELLO = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def official(router: FakeRouter) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(router) as client,
        openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        yield sdk


@async_test
async def test_whole_answers() -> None:
    """Completions and chat with n, logprobs and usage."""
    async with official(FakeRouter(says("hö"))) as sdk:
        completion = await sdk.completions.create(model=MODEL, prompt=["a", "b"], n=2, logprobs=1)
        chat = await sdk.chat.completions.create(model=MODEL, messages=HELLO, n=2, logprobs=True, top_logprobs=1)
    assert [choice.text for choice in completion.choices] == ["hö"] * 4
    assert completion.choices[3].logprobs.tokens == ["h", "bytes:\\xc3", "bytes:\\xb6", "<|im_end|>"]
    assert [choice.message.content for choice in chat.choices] == ["hö"] * 2
    assert chat.choices[0].logprobs.content[0].top_logprobs[0].token == "h"
    assert chat.usage.prompt_tokens_details.cached_tokens == 0


@async_test
async def test_streams() -> None:
    """Chunks of both endpoints, usage at the end, and the client closes by itself."""
    router = FakeRouter(says("hello"))
    async with official(router) as sdk:
        chunks = [chunk async for chunk in await sdk.completions.create(model=MODEL, prompt="a", stream=True)]
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, n=2, logprobs=True, stream_options={"include_usage": True}
        )
        chat = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello"
    assert chat[-1].usage.completion_tokens == 12
    deltas = [chunk.choices[0] for chunk in chat[:-1]]
    assert "".join(delta.delta.content or "" for delta in deltas if delta.index == 1) == "hello"
    assert deltas[0].delta.role == "assistant"
    assert router.aborted == []


@async_test
async def test_errors_have_the_clients_types() -> None:
    """Statuses become its exception classes, and an error inside a stream is raised there."""
    router = FakeRouter(lambda request: [tokens("a", None), FailReason.WORKER_DIED])
    async with official(router) as sdk:
        with pytest.raises(openai.BadRequestError) as bad:
            await sdk.completions.create(model=MODEL, prompt="a", temperature=9)
        with pytest.raises(openai.NotFoundError):
            await sdk.completions.create(model="other", prompt="a")
        with pytest.raises(openai.APIError, match="a worker was lost"):
            [chunk async for chunk in await sdk.completions.create(model=MODEL, prompt="a", stream=True)]
        router.refusal = OverloadedError("the queue is full", retry_after_s=1.0)
        with pytest.raises(openai.RateLimitError):
            await sdk.completions.create(model=MODEL, prompt="a")
        models = await sdk.models.list()
        model = await sdk.models.retrieve(MODEL)
    assert bad.value.param == "temperature"
    assert [listed.id for listed in models.data] == [model.id] == [MODEL]
