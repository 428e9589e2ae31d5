"""kill -9 of either worker at any token, with a real model: arithmetic, sampler and prefix cache take part in a failover."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.process.harness import READY_S, Server, Stream, server, until

pytestmark = pytest.mark.slow

AT_TOKENS = (1, 2, 3, 10, 50)
FURTHER = 24  # tokens that the streams still have to come when a worker is killed
PROMPTS = ("The history of the bicycle begins", "A short list of things that grow in a garden in spring:")
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
FORMED = {**SEEDED, "structured_outputs": {"regex": "([a-z]{2,9} [0-9]{3}, ){200}"}}


def open_streams(running: Server, num_tokens: int) -> list[Stream]:
    """Greedy, seeded and formed ones; penalties make a draw depend on where the prompt ended, a form on all since then."""
    asked = [(prompt, sampling) for prompt in PROMPTS for sampling in (GREEDY, SEEDED)]
    return [
        running.stream(prompt, num_tokens, ignore_eos=True, return_token_ids=True, **sampling)
        for prompt, sampling in [(PROMPTS[0], FORMED), *asked]
    ]


def token_ids(stream: Stream) -> list[int]:
    events = [json.loads(event) for event in stream.events if event != "[DONE]"]
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


def read_to_end(stream: Stream) -> tuple[str, list[int]]:
    assert stream.read_to_end()[-1] == "[DONE]"
    stream.close()
    return stream.text(), token_ids(stream)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_greedy_and_seeded_streams_survive_kills_at_any_token(role: str) -> None:
    """At token 1, 2, 3, 10 and 50: texts and token ids of all streams are those of the undisturbed run."""
    # A window of a second: deaths are never counted together, so restarts do not back off.
    with server("--kv-memory", "128MiB", "--mode", "disagg", "--restart-window-s", "1") as running:
        undisturbed = [read_to_end(stream) for stream in open_streams(running, AT_TOKENS[-1] + FURTHER)]
        assert len({text for text, _ in undisturbed}) == len(undisturbed), "greedy and seeded streams say different things"
        for at_token in AT_TOKENS:
            until(lambda: running.request("GET", "/readyz")[0] == 200, "the model loaded again", READY_S)
            streams = open_streams(running, at_token + FURTHER)
            while len(token_ids(streams[-1])) < at_token:  # the last to be opened: its tokens are read as they come
                assert streams[-1].next_event()
            os.kill(running.worker(f"{role}-0")["pid"], signal.SIGKILL)
            for stream, (whole_text, whole_ids) in zip(streams, undisturbed, strict=True):
                text, ids = read_to_end(stream)
                assert ids == whole_ids[: at_token + FURTHER], f"killed at token {at_token}"
                assert whole_text.startswith(text)
        until(lambda: running.request("GET", "/readyz")[0] == 200, "the model loaded again", READY_S)
        assert running.worker(f"{role}-0")["restarts"] == len(AT_TOKENS)
        running.wait_until_empty(1.0)
