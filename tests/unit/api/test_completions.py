"""POST /v1/completions: prompts, choices, echo, log-probabilities."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from disagg.api import completions
from disagg.api.app import Services
from disagg.api.validate import Work
from disagg.messages import TokenOutput
from disagg.request import Request
from tests.unit.api.fakes import EOS, TOKENIZER, FakeRouter, async_test, end, says, serving, tokens


@async_test
async def test_an_answer_has_openais_shape() -> None:
    """Text, finish reason and usage; end-of-sequence is counted but is no text, and its stop_reason is null."""
    router = FakeRouter(says("hello"))
    router.num_cached_tokens = 2
    async with serving(router) as client:
        answer = await client.complete(prompt="abc")
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "org/null"
    assert answer["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        ("<|im_end|>", [[EOS]]),
    ],
)
@async_test
async def test_prompts_come_in_four_forms(prompt: Any, prompts: list[list[int]]) -> None:
    """A string, strings, ids, lists of ids; a raw prompt may use special tokens."""
    router = FakeRouter(says("x"))
    async with serving(router) as client:
        answer = await client.complete(prompt=prompt)
    assert [stream.request.prompt for stream in router.streams] == prompts
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


@async_test
async def test_defaults_are_openais() -> None:
    """16 tokens, temperature 1, nothing cut off, a random seed, end-of-sequence ends."""
    router = FakeRouter(says("x"))
    async with serving(router) as client:
        await client.complete(prompt="a", temperature=None, stop=None, stop_token_ids=None, logit_bias=None)
        await client.complete(prompt="a")
    params, other = (stream.request.params for stream in router.streams)
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (16, 1.0, 0, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert params.stop_token_ids == (EOS,)
    assert (params.num_logprobs, params.num_prompt_logprobs, params.logit_bias, params.min_tokens) == (None, None, {}, 0)
    assert params.seed != other.seed
    assert 0 <= params.seed < 2**63


@async_test
async def test_every_sampling_field_reaches_the_engine() -> None:
    """What the client asks for is what the engine is told; unknown fields are ignored."""
    router = FakeRouter(says("x"))
    async with serving(router) as client:
        await client.complete(
            prompt="a", max_tokens=20, min_tokens=3, temperature=0, top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=1.1,
            presence_penalty=-1, frequency_penalty=2, logit_bias={"97": -100}, seed=7, stop_token_ids=[98, EOS],
            ignore_eos=False, user="u", priority=3, kv_transfer_params={"remote": 1}, request_id="mine",
        )  # fmt: skip
        await client.complete(prompt="a", ignore_eos=True, top_k=-1, temperature=1e-9)
    params, other = (stream.request.params for stream in router.streams)
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_k, params.top_p) == (20, 3, 0.0, 5, 0.5)
    assert (params.min_p, params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (0.1, 1.1, -1.0, 2.0)
    assert (params.logit_bias, params.seed, params.stop_token_ids) == ({97: -100.0}, 7, (98, EOS))
    assert (other.stop_token_ids, other.top_k, other.temperature) == ((), 0, 0.0)
    assert [stream.request.priority for stream in router.streams] == [3, 0]
    assert not any("mine" in stream.request.id for stream in router.streams)


@async_test
async def test_choices_are_prompt_major_with_a_seed_each() -> None:
    """n choices of each prompt, in order; seeds count up from the request's within a prompt; each prompt counts once in usage.

    So a prompt draws the same alone and in a list.
    """

    def script(request: Request) -> list[Any]:
        return [tokens(f"{chr(request.prompt[0])}{request.params.seed}")]

    router = FakeRouter(script)
    router.num_cached_tokens = 1
    async with serving(router) as client:
        answer = await client.complete(prompt=["a", "b"], n=2, best_of=2, seed=4)
    assert [choice["text"] for choice in answer["choices"]] == ["a4", "a5", "b4", "b5"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@async_test
async def test_the_best_of_several_are_answered() -> None:
    """best_of choices are drawn of each prompt, the n with the highest log-probability per token answered, all counted.

    The log-probabilities that the choice needs are not in the answer unless they were asked for.
    """
    lengths = iter((3, 1, 2, 2, 3, 1))  # a token's log-probability falls with its place, so the shortest text is the best

    def script(request: Request) -> list[Any]:
        return [tokens(chr(request.prompt[0]) * next(lengths), logprobs=True)]

    router = FakeRouter(script)
    async with serving(router) as client:
        answer = await client.complete(prompt=["a", "b"], n=2, best_of=3, return_token_ids=True)
        router.script = lambda request: [tokens("z", logprobs=True)]
        logged = await client.complete(prompt="a", best_of=2, logprobs=1)
    assert [choice["text"] for choice in answer["choices"]] == ["a", "aa", "b", "bb"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[97], [97], [98], [98]]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 12)
    assert logged["choices"][0]["logprobs"]["tokens"] == ["z"]


@async_test
async def test_seeds_stay_in_63_bits() -> None:
    """The largest seed wraps, a negative one is taken."""
    router = FakeRouter(says("x"))
    async with serving(router) as client:
        await client.complete(prompt="a", n=2, seed=2**63 - 1)
        await client.complete(prompt="a", seed=-1)
    assert [stream.request.params.seed for stream in router.streams] == [2**63 - 1, 0, 2**63 - 1]


@async_test
async def test_a_stop_string_ends_the_choice_and_the_work() -> None:
    """The text is cut before the match, the rest is stopped (no abort), and what came with it is not counted."""
    router = FakeRouter(lambda request: [tokens("ab", None), tokens("STOP and more", None)])
    async with serving(router) as client:
        answer = await client.complete(prompt="x", stop=["nope", "STOP"])
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "STOP")
    assert answer["usage"]["completion_tokens"] == 6
    assert (router.stopped, router.aborted) == (router.streams, [])


@async_test
async def test_a_stop_token_is_named_and_is_no_text() -> None:
    """stop_reason is the id for the client's own stop tokens; end-of-sequence stays null even if the client lists it."""
    router = FakeRouter(lambda request: [[*tokens("ab", None), end(98)]])
    async with serving(router) as client:
        named = await client.complete(prompt="x", stop_token_ids=[98])
        router.script = lambda request: [[*tokens("ab", None), end()]]
        plain = await client.complete(prompt="x", stop_token_ids=[98, EOS])
        listed = await client.complete(prompt="x", stop_token_ids=[EOS], ignore_eos=True)
    assert [answer["choices"][0]["text"] for answer in (named, plain, listed)] == ["ab"] * 3
    assert [answer["choices"][0]["stop_reason"] for answer in (named, plain, listed)] == [98, None, EOS]
    assert router.aborted == []


@async_test
async def test_echo_gives_the_prompt_back() -> None:
    """Strings as they were sent, ids decoded, before the text of each choice."""
    router = FakeRouter(says("cd"))
    async with serving(router) as client:
        text = await client.complete(prompt="ab", echo=True)
        ids = await client.complete(prompt=[97, EOS], echo=True, n=2)
    assert text["choices"][0]["text"] == "abcd"
    assert [choice["text"] for choice in ids["choices"]] == ["a<|im_end|>cd"] * 2
    assert router.streams[0].request.params.num_prompt_logprobs is None


@async_test
async def test_scoring_generates_nothing() -> None:
    """max_tokens 0 with echo and logprobs: an entry per prompt token, the first null, -inf written as a number."""
    router = FakeRouter(says("never"))
    async with serving(router) as client:
        answer = await client.complete(prompt="abc", max_tokens=0, echo=True, logprobs=2)
        echoed = await client.complete(prompt="abc", max_tokens=0, echo=True)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"b": -1.0, "~": -9999.0}, {"c": -2.0, "~": -9999.0}],
        "text_offset": [0, 1, 2],
    }
    assert answer["usage"]["completion_tokens"] == 0
    assert (echoed["choices"][0]["text"], echoed["choices"][0]["logprobs"]) == ("abc", None)
    assert router.streams[0].request.params.num_prompt_logprobs == 2


@pytest.mark.parametrize("is_streamed", [False, True])
@async_test
async def test_every_generated_token_has_an_entry(is_streamed: bool) -> None:
    """Also the one that ends the text: who scores a prompt with max_tokens 1 takes the last entry for the generated token."""
    async with serving(FakeRouter(lambda request: [[end()]])) as client:
        fields = {"prompt": "ab", "max_tokens": 1, "echo": True, "logprobs": 1}
        if is_streamed:
            (choice,) = (await client.complete_events(**fields))[-1]["choices"]
        else:
            (choice,) = (await client.complete(**fields))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["logprobs"]["tokens"] == ["a", "b", "<|im_end|>"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.1]
    assert choice["logprobs"]["top_logprobs"][2] == {"<|im_end|>": -0.1}
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@async_test
async def test_logprobs_follow_the_echoed_prompt() -> None:
    """With echo the prompt's entries come first and offsets count from the beginning of the whole text."""
    router = FakeRouter(says("cd"))
    async with serving(router) as client:
        answer = await client.complete(prompt="ab", max_tokens=2, echo=True, logprobs=1)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "d"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"] == [None, -1.0, -0.5, -1.5]


@async_test
async def test_logprobs_zero_is_the_chosen_token_only() -> None:
    """logprobs 0 asks the engine for the chosen token alone, and top_logprobs holds just that."""
    router = FakeRouter(says("ab"))
    async with serving(router) as client:
        answer = await client.complete(prompt="x", max_tokens=2, logprobs=0)
    assert router.streams[0].request.params.num_logprobs == 0
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}, {"b": -1.5}]


@async_test
async def test_token_ids_are_returned_on_demand() -> None:
    """return_token_ids: the prompt's and the generated ids, end-of-sequence included, whole and streamed."""
    router = FakeRouter(says("ab"))
    async with serving(router) as client:
        (choice,) = (await client.complete(prompt="xy", return_token_ids=True))["choices"]
        chunks = [event["choices"][0] for event in await client.complete_events(prompt="xy", return_token_ids=True)]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([120, 121], [97, 98, EOS])
    assert [token for chunk in chunks for token in chunk["token_ids"]] == [97, 98, EOS]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[120, 121]] + [None] * (len(chunks) - 1)


@async_test
async def test_special_tokens_show_on_demand() -> None:
    """skip_special_tokens false writes a special token that was generated as text."""
    start, *_ = TOKENIZER.encode("<|im_start|>")
    router = FakeRouter(lambda request: [[*tokens("a", None), TokenOutput(dispatch=0, token=start), *tokens("b")]])
    async with serving(router) as client:
        hidden = await client.complete(prompt="x")
        shown = await client.complete(prompt="x", skip_special_tokens=False)
    assert hidden["choices"][0]["text"] == "ab"
    assert shown["choices"][0]["text"] == "a<|im_start|>b"


@async_test
async def test_a_long_prompt_is_planned_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that takes long to tokenise is planned in a thread, a short one at once; the result is the same."""
    threads = []
    plan = completions.plan

    def recorded(raw: bytes, services: Services) -> Work:
        threads.append(threading.current_thread())
        return plan(raw, services)

    monkeypatch.setattr(completions, "plan", recorded)
    prompt = "ab" * 10_000
    async with serving(FakeRouter(says("x")), max_model_len=200_000) as client:
        short = await client.complete(prompt="ab", max_tokens=1)
        answer = await client.complete(prompt=prompt, max_tokens=1)
    assert (short["usage"]["prompt_tokens"], answer["usage"]["prompt_tokens"]) == (2, len(prompt))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


@async_test
async def test_ids_that_the_model_does_not_know_are_refused() -> None:
    """A tokenizer may have more tokens than the model has rows: such an id is a 400, also when it comes from text."""
    async with serving(FakeRouter(lambda _request: [tokens("x")]), vocab_size=100) as client:
        for fields in ({"prompt": [65, 100]}, {"prompt": "a\u007fb"}, {"prompt": "ab", "logit_bias": {"100": 1}}):
            status, _, answer = await client.post("/v1/completions", fields)
            assert status == 400, fields
            assert "0 to 99" in answer["error"]["message"]
