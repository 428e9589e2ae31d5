"""The null engine: its tokens prove the bytes it read."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.base import Chunk, Engine, Sequence
from disagg.engine.null import NullEngine
from disagg.kv import KVLayout
from disagg.model import ModelFiles, kv_layout, read_model_spec
from disagg.request import SamplingParams

SPEC = read_model_spec(ModelFiles("null", Path(), "null"))


def engine_with_pool(block_size: int = 4, num_blocks: int = 64) -> tuple[NullEngine, bytearray, KVLayout]:
    layout = kv_layout(SPEC, "float32", block_size)
    engine = NullEngine(layout)
    pool = bytearray(random.Random(0).randbytes(num_blocks * layout.block_nbytes))
    engine.bind(memoryview(pool))
    return engine, pool, layout


def sequence(tokens: list[int], blocks: list[int], **params: object) -> Sequence:
    return Sequence(1, tokens, SamplingParams(**{"max_tokens": 8, **params}), len(tokens), blocks=blocks)


def run(engine: Engine, tokens: list[int], blocks: list[int], chunk_tokens: int) -> int:
    seq = sequence(tokens, blocks)
    token = None
    for start in range(0, len(tokens), chunk_tokens):
        token = engine.step([Chunk(seq, start, min(chunk_tokens, len(tokens) - start))])[0].token
    assert token is not None
    return token


def test_layout_is_16_bytes_a_token() -> None:
    """Whatever type is asked for, a token's KV is 16 bytes."""
    assert kv_layout(SPEC, "bfloat16", 1).block_nbytes == 16


@given(st.lists(st.integers(0, 258), min_size=1, max_size=60), st.integers(1, 60), st.integers(1, 9), st.randoms())
def test_token_does_not_depend_on_chunks_or_blocks(tokens: list[int], chunk: int, block_size: int, rng: random.Random) -> None:
    """Chunk size, block size and the choice of blocks change nothing; the token is printable ASCII."""
    expected = run(engine_with_pool()[0], tokens, list(range(20)), len(tokens))
    blocks = rng.sample(range(64), 60)
    assert run(engine_with_pool(block_size)[0], tokens, blocks, chunk) == expected
    assert 32 <= expected < 127


@given(st.integers(0, 21 * 16 - 1), st.integers(1, 255))
def test_any_wrong_byte_changes_the_tokens(index: int, flip: int) -> None:
    """A byte flipped in any written slot changes the continuation (one token hides it in 1 of 95 cases, four in a row do not)."""
    tokens = list(range(40, 61))
    clean, dirty = [], []
    for is_dirty, out in ((False, clean), (True, dirty)):
        engine, pool, layout = engine_with_pool()
        seq = sequence(list(tokens), list(range(10, 20)))
        engine.step([Chunk(seq, 0, len(tokens))])
        if is_dirty:
            slot, byte = divmod(index, 16)
            block, offset = divmod(slot, 4)
            half, rest = divmod(byte, 8)
            pool[(10 + block) * layout.block_nbytes + half * 32 + offset * 8 + rest] ^= flip
        seq.tokens.append(65)
        for _ in range(4):
            token = engine.step([Chunk(seq, len(seq.tokens) - 1, 1)])[0].token
            assert token is not None
            out.append(token)
            seq.tokens.append(65)  # the same inputs on both sides: only the pool differs
    assert clean != dirty


def test_unwritten_slots_are_not_read() -> None:
    """Bytes after the sequence's end have no influence."""
    tokens = list(range(10))
    results = []
    for seed in (1, 2):
        engine, pool, _ = engine_with_pool()
        pool[:] = random.Random(seed).randbytes(len(pool))
        results.append(run(engine, tokens, list(range(5)), 10))
    assert results[0] == results[1]


def test_swapped_blocks_change_the_token() -> None:
    """The order of the blocks counts."""
    engine, _, _ = engine_with_pool()
    tokens = list(range(12))
    seq = sequence([*tokens, 65], [0, 1, 2, 3])
    engine.step([Chunk(seq, 0, 12)])
    expected = engine.step([Chunk(seq, 12, 1)])[0].token
    seq.blocks = [1, 0, 2, 3]
    assert engine.step([Chunk(seq, 12, 1)])[0].token != expected


def test_only_the_last_chunk_samples() -> None:
    """A chunk before the last, and a request for no tokens, give none."""
    engine, _, _ = engine_with_pool()
    seq = sequence(list(range(10)), [0, 1, 2])
    assert engine.step([Chunk(seq, 0, 5)])[0].token is None
    assert engine.step([Chunk(seq, 5, 5)])[0].token is not None
    scored = sequence(list(range(10)), [3, 4, 5], max_tokens=0, num_prompt_logprobs=2)
    sample = engine.step([Chunk(scored, 0, 10)])[0]
    assert sample.token is None
    assert sample.prompt_logprobs is not None
    assert len(sample.prompt_logprobs) == 9


def test_logprobs_have_the_shape_asked_for() -> None:
    """Made up, but deterministic, falling, and led by the chosen token; prompt entries do not depend on the chunking."""
    whole, parts = [], []
    for chunk_tokens, out in ((10, whole), (3, parts)):
        engine, _, _ = engine_with_pool()
        seq = sequence(list(range(10)), [0, 1, 2], num_logprobs=3, num_prompt_logprobs=2)
        for start in range(0, 10, chunk_tokens):
            sample = engine.step([Chunk(seq, start, min(chunk_tokens, 10 - start))])[0]
            out += sample.prompt_logprobs or []
        assert sample.logprobs is not None
        assert sample.logprobs.top[0] == (sample.token, sample.logprobs.logprob)
        values = [value for _, value in sample.logprobs.top]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
    assert whole == parts
    assert len(whole) == 9
