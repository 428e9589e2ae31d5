"""Answers under a grammar, in the whole server without processes: where they are computed, and what dies, changes nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from disagg import grammar
from disagg.engine.base import Engine
from disagg.engine.null import NullEngine
from disagg.errors import RequestFailedError
from disagg.grammar import Compiler
from disagg.messages import Configure
from disagg.model import find_model
from disagg.request import FailReason, RequestState
from disagg.text.grammar_vocabulary import grammar_vocabulary
from disagg.text.tokenizer import load_tokenizer
from disagg.text.tools import HERMES, MISTRAL, MISTRAL_V11, MISTRAL_V13, ToolFormat, ToolParser, ToolSupport, calls_grammar
from tests.sim.world import World, collect, make_layout, request, world

VOCABULARY = grammar_vocabulary(load_tokenizer(find_model("null")))
COMPILER = Compiler(VOCABULARY)
(END,) = VOCABULARY.ends
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
                   "tags": {"type": "array", "items": {"enum": ["new", "old", "rare"]}, "maxItems": 3}},
    "required": ["name", "age", "tags"], "additionalProperties": False,
}  # fmt: skip
JSON = {"grammar": grammar.json_schema(SCHEMA), "stop_token_ids": (END,)}
PROMPTS = [f"{index} is to be described" for index in range(5)]
NUM_TOKENS = 120


def make_engine(settings: Configure) -> Engine:
    return NullEngine(make_layout(settings.block_size), COMPILER)


async def answers(w: World, **params: Any) -> list[list[int]]:
    return list(
        await asyncio.gather(*(collect(w.router.submit(request(prompt, NUM_TOKENS, **{**JSON, **params}))) for prompt in PROMPTS))
    )


async def colocated(**params: Any) -> list[list[int]]:
    async with world("mixed", prefix_cache=False, make_engine=make_engine) as w:
        return await answers(w, **params)


def text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token != END).decode()


async def test_answers_are_what_the_schema_says() -> None:
    """Complete, valid, different for each prompt; they stop by themselves, without an end of sequence after the last brace."""
    expected = await colocated()
    for tokens in expected:
        jsonschema.validate(json.loads(text(tokens)), SCHEMA)
        assert tokens[-1] == ord("}")
    assert len({text(tokens) for tokens in expected}) > 1


@pytest.mark.parametrize("chunk_tokens", [4, 64])
async def test_disaggregated_equals_colocated(chunk_tokens: int) -> None:
    """The first token is drawn on prefill and the rest on decode, under one grammar."""
    async with world("prefill", "decode", chunk_tokens=chunk_tokens, make_engine=make_engine) as w:
        assert await answers(w) == await colocated()
        assert sum(w.metrics.transfers) > 0


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 9, 20])
async def test_a_death_at_any_token_changes_nothing(worker: str, num_tokens: int) -> None:
    """The next worker reads what had been generated, once, and goes on from there."""
    expected = await colocated()
    async with world("prefill", "decode", make_engine=make_engine) as w:
        streams = [w.router.submit(request(prompt, NUM_TOKENS, **JSON)) for prompt in PROMPTS]
        running = [asyncio.create_task(collect(stream)) for stream in streams]
        await w.until(lambda: len(streams[0].tokens) >= num_tokens, f"{num_tokens} tokens")
        w.handles[worker].kill()
        assert await asyncio.gather(*running) == expected
        assert all(stream.state is RequestState.FINISHED for stream in streams)


TOOLS = {"look": SCHEMA, "look_up": {"type": "object", "properties": {}, "additionalProperties": False}}


@pytest.mark.parametrize("form", [HERMES, MISTRAL, MISTRAL_V11, MISTRAL_V13], ids=["hermes", "mistral", "v11", "v13"])
@pytest.mark.parametrize("other", [None, JSON["grammar"]], ids=["required", "calls or a form"])
async def test_calls_are_the_same_wherever_they_are_computed(form: ToolFormat, other: str | None) -> None:
    """One worker, two, and two of which one dies in the middle: the same tokens, which are read as the same calls."""
    asked = {"grammar": calls_grammar(ToolSupport(form, {}), TOOLS, may_be_many=False, other=other)}
    expected = await colocated(**asked)
    async with world("prefill", "decode", chunk_tokens=4, make_engine=make_engine) as w:
        assert await answers(w, **asked) == expected
    async with world("prefill", "decode", make_engine=make_engine) as w:
        streams = [w.router.submit(request(prompt, NUM_TOKENS, **{**JSON, **asked})) for prompt in PROMPTS]
        running = [asyncio.create_task(collect(stream)) for stream in streams]
        await w.until(lambda: len(streams[0].tokens) >= 12, "twelve tokens")
        w.handles["decode-0"].kill()
        assert await asyncio.gather(*running) == expected
    num_calls = 0
    for tokens in expected:
        parser = ToolParser(form, TOOLS, is_either=other is not None)
        (content, deltas), (rest, more) = parser.push(text(tokens)), parser.flush()
        num_calls += parser.num_complete
        if parser.num_told:
            name, arguments = deltas[0].name, "".join(delta.arguments for delta in [*deltas, *more])
            assert name in TOOLS
            jsonschema.validate(json.loads(arguments), TOOLS[name])
        else:
            jsonschema.validate(json.loads(content + rest), SCHEMA)
    assert num_calls == len(PROMPTS) if other is None else num_calls <= len(PROMPTS)


async def test_preemption_changes_nothing() -> None:
    """A pool that cannot hold all streams: some are computed again, and their matchers stay where they were."""
    expected = await colocated()
    num_blocks = max(len(prompt) + len(tokens) for prompt, tokens in zip(PROMPTS, expected, strict=True)) // 4 + 12
    async with world("prefill", "decode", kv_nbytes=num_blocks * make_layout().block_nbytes, make_engine=make_engine) as w:
        assert await answers(w) == expected
        assert w.engine_worker("decode-0").stats().preemptions > 0


async def test_min_tokens_and_no_end_of_sequence() -> None:
    """min_tokens stretch what can be stretched; without stop ids an answer still ends where nothing may follow."""
    unbounded = {"grammar": grammar.regex("[a-z]*"), "stop_token_ids": (END,)}
    (short, *_) = await colocated(**unbounded)
    assert short[-1] == END
    assert all(len(tokens) > 60 for tokens in await colocated(**unbounded, min_tokens=60))
    assert await colocated(stop_token_ids=()) == await colocated()
    assert [text(tokens) for tokens in await colocated(grammar=grammar.regex("ab"), min_tokens=50)] == ["ab"] * len(PROMPTS)


async def test_a_grammar_that_gets_too_complex_fails_its_request_only() -> None:
    """The one request ends with an error that says so, at a worker that goes on serving the others."""
    monster = grammar.regex("((((a{1,200}){1,200}){1,200}){1,200}){1,200}")
    async with world("prefill", "decode", make_engine=make_engine) as w:
        others = asyncio.create_task(answers(w))
        with pytest.raises(RequestFailedError, match="grammar") as caught:
            await collect(w.router.submit(request("x", NUM_TOKENS, grammar=monster, min_tokens=60, stop_token_ids=(END,))))
        assert caught.value.reason == FailReason.BROKEN_OUTPUT
        assert await others == await colocated()


async def test_an_engine_without_grammars_fails_the_request() -> None:
    """What was promised by mistake is an error, not an answer of any form."""
    async with world("mixed") as w:
        with pytest.raises(RequestFailedError):
            await collect(w.router.submit(request("x", 8, **JSON)))
