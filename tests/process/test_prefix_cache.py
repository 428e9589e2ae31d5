"""Repeated prefixes on the real command: prefill does not compute them again, and what decode still has is not moved again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.process.harness import Server, null_server

BLOCK_SIZE = 16
BLOCK_NBYTES = 2 * BLOCK_SIZE * 8  # the null model's: key and value of 8 bytes


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with null_server("--mode", "disagg") as shared:
        yield shared


def num_moved(running: Server) -> int:
    """Blocks handed over so far, when nothing is under way any more."""
    running.wait_until_empty(2.0)
    lines = running.request("GET", "/metrics")[1].splitlines()
    moved = (float(line.split()[-1]) for line in lines if line.startswith("disagg_transfer_bytes_total{"))
    return int(sum(moved)) // BLOCK_NBYTES


def ask(running: Server, prompt: list[int], max_tokens: int = 4) -> tuple[dict[str, Any], int]:
    """The answer to ``prompt``, and how many blocks were handed over for it."""
    before = num_moved(running)
    status, answer = running.request("POST", "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0})
    assert status == 200, answer
    return answer, num_moved(running) - before


def test_a_repeated_prompt_is_computed_and_moved_once(running: Server) -> None:
    """The second time all full blocks are found on both sides: only the last one, which is not full, is computed and moved."""
    prompt = [40 + index % 50 for index in range(6 * BLOCK_SIZE + 4)]
    (first, moved_first), (second, moved_second) = (ask(running, prompt) for _ in range(2))
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)] == [0, 6 * BLOCK_SIZE]
    assert (moved_first, moved_second) == (7, 1)
    assert first["choices"][0]["text"] == second["choices"][0]["text"]


def test_a_conversation_moves_only_what_is_new(running: Server) -> None:
    """Decode has the answer's blocks, too: of a prompt that goes on after it, it is sent only the blocks after them."""
    question = [60 + index % 30 for index in range(4 * BLOCK_SIZE)]
    first, _ = ask(running, question, 2 * BLOCK_SIZE + 1)  # KV of the last token is never computed
    answer = list(first["choices"][0]["text"].encode())
    again, moved = ask(running, question + answer + [50] * BLOCK_SIZE)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * BLOCK_SIZE, "prefill knows the question only"
    assert moved == -(-(len(question) + len(answer) + BLOCK_SIZE) // BLOCK_SIZE) - 6


def test_a_prompt_that_begins_otherwise_finds_nothing(running: Server) -> None:
    """A block is known by all tokens before it, not by its own."""
    prompt = [80 + index % 40 for index in range(4 * BLOCK_SIZE)]
    ask(running, prompt)
    answer, moved = ask(running, [33, *prompt[1:]])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert moved == 4
