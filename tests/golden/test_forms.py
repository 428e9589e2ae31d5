"""The built-in model under twenty schemas: whatever it would rather say, what it says is valid."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from disagg import grammar
from disagg.engine.base import Engine
from disagg.engine.load import load_engine
from disagg.engine.torch_engine import TorchEngine
from disagg.grammar import Compiler
from disagg.messages import Configure
from disagg.model import find_model
from disagg.request import Request, SamplingParams
from disagg.text.chat_template import load_chat_template
from disagg.text.grammar_vocabulary import grammar_vocabulary
from disagg.text.tokenizer import load_tokenizer
from tests.golden.test_disaggregation import BLOCK_SIZE
from tests.sim.world import collect, world

NAME = {"type": "string", "maxLength": 12}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS: list[dict[str, Any]] = [
    obj(name=NAME),
    obj(name=NAME, age={"type": "integer", "minimum": 0, "maximum": 150}),
    obj(ok={"type": "boolean"}),
    obj(colour={"enum": ["red", "green", "blue"]}),
    obj(point=obj(x={"type": "integer", "minimum": -9, "maximum": 9}, y={"type": "integer", "minimum": -9, "maximum": 9})),
    obj(tags={"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3}),
    obj(when={"type": "string", "format": "date"}),
    obj(id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}),
    obj(price={"type": "number", "minimum": 0, "maximum": 99}),
    obj(nothing={"type": "null"}),
    obj(either={"anyOf": [{"type": "boolean"}, {"enum": ["maybe"]}]}),
    obj(fixed={"const": {"deep": [1, 2, {"three": 3}]}}),
    obj(city=NAME, country=NAME),
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    {"enum": ["yes", "no"]},
    {"type": "integer", "minimum": 10, "maximum": 99},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}}, "additionalProperties": False},
    {"$ref": "#/$defs/pair", "$defs": {"pair": {"type": "array", "items": NAME, "minItems": 2, "maxItems": 2}}},
    {"type": "array", "prefixItems": [{"type": "integer", "maximum": 99, "minimum": 0}, {"type": "null"}], "items": False,
     "minItems": 2},
    obj(email={"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.com$"}),
]  # fmt: skip
NUM_TOKENS = 64


class BuiltIn:
    def __init__(self) -> None:
        files = find_model("smollm2")
        self.tokenizer = load_tokenizer(files)
        template = load_chat_template(files, self.tokenizer)
        assert template is not None
        self.compiler = Compiler(grammar_vocabulary(self.tokenizer))
        self.vocab_size = self.tokenizer.vocab_size
        loaded = load_engine(
            files, dtype="float32", block_size=BLOCK_SIZE, vocab_size=self.vocab_size, device="cpu", progress=lambda *_: None
        )
        assert isinstance(loaded, TorchEngine)
        self.loaded = loaded
        self.prompt = template.encode([{"role": "user", "content": "Tell me about the weather as JSON."}])

    def make_engine(self, settings: Configure) -> Engine:
        return TorchEngine(self.loaded._model, self.loaded.layout, vocab_size=self.vocab_size, compiler=self.compiler)

    def request(self, index: int, **drawing: Any) -> Request:
        params = SamplingParams(
            max_tokens=NUM_TOKENS,
            grammar=grammar.json_schema(SCHEMAS[index]),
            stop_token_ids=self.tokenizer.eos_token_ids,
            **drawing,
        )
        return Request(id=f"{index} {drawing}", prompt=self.prompt, params=params)

    def answer(self, *roles: str, requests: list[Request]) -> list[list[int]]:
        async def run() -> list[list[int]]:
            async with world(
                *roles, make_engine=self.make_engine, block_size=BLOCK_SIZE, kv_nbytes=400 * self.loaded.layout.block_nbytes,
                max_num_seqs=64, chunk_tokens=512,
            ) as w:  # fmt: skip
                return list(await asyncio.gather(*(collect(w.router.submit(request), 120.0) for request in requests)))

        return asyncio.run(run())


@pytest.fixture(scope="module")
def built_in() -> BuiltIn:
    return BuiltIn()


@pytest.mark.slow
def test_twenty_schemas_greedy_and_seeded(built_in: BuiltIn) -> None:
    """Every answer ends by itself within its tokens and is valid; prefill draws its first token and decode the others."""
    drawings: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.2, "seed": 5}]
    requests = [built_in.request(index, **drawing) for drawing in drawings for index in range(len(SCHEMAS))]
    answers = built_in.answer("prefill", "decode", requests=requests)
    for index, tokens in enumerate(answers):
        text = built_in.tokenizer.decode([token for token in tokens if token not in built_in.tokenizer.eos_token_ids])
        jsonschema.validate(json.loads(text), SCHEMAS[index % len(SCHEMAS)])
    assert len({tuple(tokens) for tokens in answers}) > len(SCHEMAS), "greedy and seeded answers differ"


def test_colocated_says_the_same(built_in: BuiltIn) -> None:
    """One worker alone, the same draws."""
    requests = [built_in.request(index, temperature=0.9, seed=index) for index in (3, 5)]
    assert built_in.answer("mixed", requests=requests) == built_in.answer("prefill", "decode", requests=requests)
