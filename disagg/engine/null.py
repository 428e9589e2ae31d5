"""An engine without a model, for tests, simulation and measuring everything around the model. numpy only.

The KV of a token is 16 bytes drawn from its id and position; the next token is a hash of all KV bytes of the sequence, read
from the pool through the block table. A byte that is wrong, stale or missing changes the tokens.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from disagg.engine.base import Chunk, Sample
from disagg.engine.grammar import Grammars
from disagg.errors import GrammarError
from disagg.grammar import Mask, Matchers
from disagg.kv import KVLayout
from disagg.messages import TokenLogprobs

_FIRST, _NUM = 32, 95  # the printable ASCII characters, so never a stop id
_IS_LIKELY = np.array([_FIRST <= token < _FIRST + _NUM or token >= 256 for token in range(259)])


class NullEngine:
    """``layout`` must be the null model's: 1 layer, 1 head of 8 bytes."""

    def __init__(self, layout: KVLayout, compiler: Matchers | None = None) -> None:
        self.layout = layout
        self._grammars = Grammars(compiler)
        self._pool: npt.NDArray[np.uint8] = np.empty((0, 2, layout.block_size, 8), np.uint8)

    def bind(self, pool: memoryview) -> None:
        self._pool = np.frombuffer(pool, dtype=np.uint8).reshape(-1, 2, self.layout.block_size, 8)

    def step(self, batch: list[Chunk]) -> list[Sample]:
        return [self._run(chunk) for chunk in batch]

    def _run(self, chunk: Chunk) -> Sample:
        sequence, params, end = chunk.sequence, chunk.sequence.params, chunk.start + chunk.num_tokens
        self._write(chunk)
        prompt_logprobs = None
        if params.num_prompt_logprobs is not None:
            targets = range(chunk.start + 1, min(end + 1, sequence.num_prompt))
            prompt_logprobs = [
                _logprobs(sequence.tokens[i], sequence.tokens[i - 1] * 31 + i, params.num_prompt_logprobs) for i in targets
            ]
        if not chunk.is_last or params.max_tokens == 0:
            return Sample(None, prompt_logprobs=prompt_logprobs)
        digest = self._digest(sequence.blocks, end)
        try:
            token = _choose(digest, self._grammars.allowed(sequence))
            is_complete = self._grammars.read(sequence, token)
        except GrammarError:
            return Sample(None, prompt_logprobs=prompt_logprobs, is_broken=True)
        logprobs = None if params.num_logprobs is None else _logprobs(token, digest, params.num_logprobs)
        return Sample(token, logprobs, prompt_logprobs, is_complete=is_complete)

    def _write(self, chunk: Chunk) -> None:
        positions = np.arange(chunk.start, chunk.start + chunk.num_tokens)
        tokens = np.array(chunk.sequence.tokens[chunk.start : chunk.start + chunk.num_tokens])
        first = chunk.start // self.layout.block_size
        blocks = np.array(chunk.sequence.blocks[first:])[positions // self.layout.block_size - first]
        self._pool[blocks, :, positions % self.layout.block_size] = _kv_bytes(tokens, positions)

    def _digest(self, blocks: list[int], num_tokens: int) -> int:
        """CRC-32 over the sequence's keys in order, then its values."""
        kv = self._pool[blocks[: self.layout.num_blocks(num_tokens)]]  # [blocks, 2, block_size, 8]
        keys, values = (kv[:, half].reshape(-1, 8)[:num_tokens] for half in (0, 1))
        return zlib.crc32(values.tobytes(), zlib.crc32(keys.tobytes()))


def _kv_bytes(tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """[tokens, 2, 8]: key and value bytes, from two rounds of a multiplicative hash of (token, position)."""
    words = tokens.astype(np.uint64) << np.uint64(32) | positions.astype(np.uint64)
    rounds = []
    for _ in range(2):
        words = (words ^ (words >> np.uint64(30)) ^ np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        words ^= words >> np.uint64(27)
        rounds.append(words)
    return np.stack(rounds, axis=1).view(np.uint8).reshape(-1, 2, 8)


def _choose(digest: int, allowed: Mask | None) -> int:
    """A printable character; under a grammar one that it allows, or the end, or what else it allows where it does neither."""
    if allowed is None:
        return _FIRST + digest % _NUM
    candidates = np.flatnonzero(allowed & _IS_LIKELY)
    if not len(candidates):
        candidates = np.flatnonzero(allowed)
    return int(candidates[digest % len(candidates)])


def _logprobs(token: int, digest: int, num_top: int) -> TokenLogprobs:
    """Made up: always the same for the same token after the same bytes; ``token`` is the likeliest."""
    best = -(1 + digest % 100) / 100
    others = [(_FIRST + (token - _FIRST + rank) % _NUM, best - rank) for rank in range(1, num_top)]
    return TokenLogprobs(best, [(token, best), *others][:num_top])
