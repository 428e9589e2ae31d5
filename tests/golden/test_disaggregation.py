"""The chain: colocated == disaggregated over memory == over shared memory, with real models and all parts but the processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from disagg.engine.base import Engine
from disagg.engine.load import load_engine
from disagg.engine.torch_engine import TorchEngine
from disagg.messages import Configure
from disagg.request import Request, SamplingParams
from tests.golden.conftest import BUILT_IN, Case, prompt
from tests.sim.world import Memory, Shm, World, world

Outputs = list[tuple[int, float]]  # of one request: tokens with their log-probabilities

BLOCK_SIZE = 16
NUM_PROMPTS = 8


class Setup:
    """One model's weights, read once, and an engine around them for each worker."""

    def __init__(self, case: Case, num_tokens: int) -> None:
        self.vocab_size = case.reference.config.vocab_size
        loaded = load_engine(
            case.files,
            dtype="float32",
            kv_dtype="float16",
            block_size=BLOCK_SIZE,
            vocab_size=self.vocab_size,
            device="cpu",
            progress=lambda _fraction, _what: None,
        )
        assert isinstance(loaded, TorchEngine)
        self._loaded = loaded
        self.num_tokens = num_tokens
        self.prompts = [prompt(self.vocab_size, 5 + 13 * index, seed=index) for index in range(NUM_PROMPTS)]

    def make_engine(self, settings: Configure) -> Engine:
        return TorchEngine(self._loaded._model, self._loaded.layout, vocab_size=self.vocab_size)

    def kv_nbytes(self, num_blocks: int) -> int:
        return num_blocks * self._loaded.layout.block_nbytes

    def run(
        self,
        *roles: str,
        is_batched: bool,
        num_prompts: int = NUM_PROMPTS,
        num_tokens: int | None = None,
        num_blocks: int = 200,
        look: Callable[[World], None] | None = None,
        **how: Any,
    ) -> list[Outputs]:
        """The outputs of the first ``num_prompts`` prompts; ``look`` sees the world when all have ended."""

        async def requests() -> list[Outputs]:
            async with world(
                *roles,
                make_engine=self.make_engine,
                block_size=BLOCK_SIZE,
                kv_nbytes=self.kv_nbytes(num_blocks),
                **{"prefix_cache": False, **how},
            ) as w:
                pending = [collect(w, self.request(index, num_tokens)) for index in range(num_prompts)]
                outputs = await asyncio.gather(*pending) if is_batched else [await one for one in pending]
                if look is not None:
                    look(w)
                return outputs

        return asyncio.run(requests())

    def request(self, index: int, num_tokens: int | None = None) -> Request:
        """Every other request is sampled, with penalties: its draws and counts must not depend on where it runs."""
        sampled = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": index, "presence_penalty": 0.5}
        drawing = sampled if index % 2 else {"temperature": 0.0}
        params = SamplingParams(max_tokens=num_tokens or self.num_tokens, num_logprobs=0, **drawing)
        return Request(id=str(index), prompt=self.prompts[index], params=params)


async def collect(w: World, request: Request) -> Outputs:
    outputs = []
    async for batch in w.router.submit(request):
        outputs += [(output.token, output.logprobs.logprob if output.logprobs else 0.0) for output in batch]
    return outputs


def assert_equal(got: list[Outputs], expected: list[Outputs]) -> None:
    assert [[token for token, _ in one] for one in got] == [[token for token, _ in one] for one in expected]
    for one, other in zip(got, expected, strict=True):
        for (_, a), (_, b) in zip(one, other, strict=True):
            assert a == pytest.approx(b, abs=2e-3)


@pytest.fixture(scope="module", params=["llama", "qwen2-yarn", "qwen3-tied", pytest.param(BUILT_IN, marks=pytest.mark.slow)])
def setup(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Setup:
    return Setup(cases(request.param), num_tokens=16 if request.param == BUILT_IN else 40)


@pytest.fixture(scope="module")
def expected(setup: Setup) -> list[Outputs]:
    """Colocated, one request at a time, prompts in one chunk."""
    outputs = setup.run("mixed", is_batched=False, chunk_tokens=512)
    assert [len(one) for one in outputs] == [setup.num_tokens] * NUM_PROMPTS
    return outputs


def moves_kv(w: World) -> None:
    assert sum(w.metrics.transfers) > 0
    assert all(handle.worker.stats().decode_prefill_tokens == 0 for handle in w.handles.values())


@pytest.mark.parametrize("chunk_tokens", [16, 64, 512])
@pytest.mark.parametrize("fabric", [Memory, Shm], ids=["memory", "shm"])
@pytest.mark.parametrize("is_batched", [False, True], ids=["alone", "batch of 8"])
def test_disaggregated_equals_colocated(
    setup: Setup, expected: list[Outputs], fabric: type[Memory | Shm], chunk_tokens: int, is_batched: bool
) -> None:
    """Over memory and over shared memory, with any chunk size, alone and in a batch: the same tokens, nothing computed twice."""
    got = setup.run("prefill", "decode", is_batched=is_batched, chunk_tokens=chunk_tokens, fabric=fabric(), look=moves_kv)
    assert_equal(got, expected)


def test_colocated_in_a_batch_with_small_chunks_is_the_same(setup: Setup, expected: list[Outputs]) -> None:
    """The colocated run itself does not depend on batch or chunks."""
    assert_equal(setup.run("mixed", is_batched=True, chunk_tokens=16), expected)


def test_preemption_on_decode_changes_nothing(setup: Setup) -> None:
    """A decode pool that cannot hold all streams: some give their blocks back, are computed again, and say the same."""

    def preempted(w: World) -> None:
        assert w.engine_worker("decode-0").stats().preemptions > 0

    few = {"num_prompts": 3, "num_tokens": 90}
    expected = setup.run("mixed", is_batched=False, **few)
    # 5 blocks hold the three prompts, 13 with what each must have left to grow into; the whole answers need 22.
    got = setup.run("prefill", "decode", is_batched=True, num_blocks=15, chunk_tokens=64, look=preempted, **few)
    assert_equal(got, expected)


def test_prefix_hits_on_both_sides_change_nothing(setup: Setup, expected: list[Outputs]) -> None:
    """The same prompts a second time, from warm caches, give the same tokens."""

    async def twice() -> tuple[list[Outputs], int]:
        async with world(
            "prefill",
            "decode",
            make_engine=setup.make_engine,
            block_size=BLOCK_SIZE,
            kv_nbytes=setup.kv_nbytes(200),
            fabric=Shm(),
        ) as w:
            for index in range(NUM_PROMPTS):
                await collect(w, setup.request(index))
            outputs = [await collect(w, setup.request(index)) for index in range(NUM_PROMPTS)]
            return outputs, w.engine_worker("prefill-0").stats().prefix_hits

    outputs, hits = asyncio.run(twice())
    assert hits > 0
    assert_equal(outputs, expected)
