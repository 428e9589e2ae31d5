"""What a new user sees: the command with the built-in model, asked through openai-python."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.process.harness import Server, server

QUESTION = [{"role": "user", "content": "Can you tell me the capital of France?"}]


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with server("--kv-memory", "512MiB") as shared:
        yield shared


def test_the_capital_of_france_is_streamed_from_two_processes(running: Server, client: openai.OpenAI) -> None:
    """Paris, token by token; prefill and decode apart, nothing computed twice, every block free or cached afterwards."""
    model = client.models.list().data[0].id
    chunks = list(client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=40, stream=True))
    deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "Paris" in "".join(deltas)
    assert len(deltas) > 3, "not streamed token by token"
    assert chunks[-1].choices[0].finish_reason == "stop"
    running.wait_until_empty(1.0)
    status = running.status()
    assert [worker["role"] for worker in status["workers"]] == ["prefill", "decode"]
    assert status["pairs"][0]["transport"] == "shm"
    assert all(worker["decode_prefill_tokens"] == 0 and worker["steps"] > 0 for worker in status["workers"])


def test_whole_streamed_and_repeated_answers_agree(running: Server, client: openai.OpenAI) -> None:
    """The same greedy text with and without streaming, cold and from the prefix cache; usage says what was cached."""
    ask = {"model": "SmolLM2-135M-Instruct", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    first = client.chat.completions.create(**ask)
    second = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert first.choices[0].message.content == second.choices[0].message.content == streamed
    assert first.usage is not None
    assert second.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == first.usage.completion_tokens
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens // 16 * 16


@pytest.mark.slow
def test_seeded_answers_and_their_logprobs_equal_the_colocated_servers(running: Server) -> None:
    """Disaggregation changes neither a draw nor a log-probability, for n > 1 too."""
    body = {
        "prompt": "The three primary colours are", "max_tokens": 12, "temperature": 0.8, "seed": 7, "n": 2, "logprobs": 2,
    }  # fmt: skip
    with server("--mode", "colocated", "--kv-memory", "512MiB") as colocated:
        expected = colocated.request("POST", "/v1/completions", body)[1]
    got = running.request("POST", "/v1/completions", body)[1]
    for one, other in zip(got["choices"], expected["choices"], strict=True):
        assert one["text"] == other["text"]
        assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
        assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-3)
    assert got["usage"] == expected["usage"]


def test_a_scored_prompt_equals_the_colocated_servers(running: Server) -> None:
    """echo with logprobs and no tokens asked for: every prompt token's log-probability, nothing generated, nothing moved."""
    status, answer = running.request(
        "POST", "/v1/completions", {"prompt": "Paris is the capital of France.", "max_tokens": 0, "echo": True, "logprobs": 1}
    )
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["text"] == "Paris is the capital of France."
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(-30 < logprob < 0 for logprob in choice["logprobs"]["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0
