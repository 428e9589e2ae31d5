"""The real engine: one forward pass of a Llama over the paged pool, then sampling of the rows that end a sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from disagg.engine.base import Chunk, Sample
from disagg.engine.grammar import Grammars
from disagg.engine.sampling import Row, greatest, sample, score
from disagg.errors import GrammarError
from disagg.grammar import Matchers
from disagg.kernels.paged import Work
from disagg.kv import KVLayout
from disagg.messages import TokenLogprobs
from disagg.model import ModelSpec

_NO_SAMPLE = Sample(None)
_BROKEN = Sample(None, is_broken=True)
_SCORE_ROWS = 256
"""Prompt rows scored at once: with a vocabulary of 50,000 their float32 logits are 50 MB."""


class Model(Protocol):
    """A decoder's weights on one device, and its forward pass."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device

    def forward(self, works: Sequence[Work], tokens: Sequence[int], pool: Tensor) -> Tensor:
        """The last layer's output [len(tokens), hidden_size] of ``tokens``, the works' one after another; writes their KV."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab_size]"""
        ...


class TorchEngine:
    """``vocab_size``: the tokenizer's; ids at and above it are never sampled."""

    def __init__(self, model: Model, layout: KVLayout, *, vocab_size: int, compiler: Matchers | None = None) -> None:
        self.layout = layout
        self._grammars = Grammars(compiler)
        self._model = model
        self._vocab_size = min(vocab_size, model.spec.vocab_size)
        self._pool: Tensor | None = None

    def __repr__(self) -> str:
        num_blocks = 0 if self._pool is None else len(self._pool)
        return f"<TorchEngine {self._model.spec.architecture}, {self._model.dtype}, {self._model.device}, {num_blocks} blocks>"

    def bind(self, pool: memoryview) -> None:
        shape = self.layout.shape(pool.nbytes // self.layout.block_nbytes)
        self._pool = torch.frombuffer(pool, dtype=getattr(torch, self.layout.dtype)).view(shape)

    @torch.inference_mode()
    def step(self, batch: list[Chunk]) -> list[Sample]:
        hidden = self._hidden(batch)
        sampled = self._sample(batch, hidden)
        samples, row = [], 0
        for index, chunk in enumerate(batch):
            sample = sampled.get(index, _NO_SAMPLE)
            scores = self._score_prompt(chunk, hidden[row : row + chunk.num_tokens]) if _wants_scores(chunk) else None
            samples.append(sample if scores is None else replace(sample, prompt_logprobs=scores))
            row += chunk.num_tokens
        return samples

    def _sample(self, batch: list[Chunk], hidden: Tensor) -> dict[int, Sample]:
        """By its place in ``batch``, the sample of each chunk that ends a sequence which is to go on."""
        samples: dict[int, Sample] = {}
        ends, rows, last_rows, row = [], [], [], -1
        for index, chunk in enumerate(batch):
            sequence = chunk.sequence
            row += chunk.num_tokens
            if not chunk.is_last or sequence.params.max_tokens == 0:
                continue
            samples[index] = _BROKEN  # until it turns out to be better
            try:
                allowed = self._grammars.allowed(sequence)
            except GrammarError:
                continue
            rows.append(Row(sequence.params, sequence.tokens, sequence.num_prompt, allowed))
            ends.append(index)
            last_rows.append(row)
        if not rows:
            return samples
        logits = self._logits(hidden if len(last_rows) == len(hidden) else hidden[last_rows])
        best, is_finite = greatest(logits)
        if not all(is_finite):
            kept = [row for row, is_good in enumerate(is_finite) if is_good]
            logits, best = logits[kept], [best[row] for row in kept]
            ends, rows = [ends[row] for row in kept], [rows[row] for row in kept]
        for index, (token, logprobs) in zip(ends, sample(logits, rows, best)):
            try:
                samples[index] = Sample(token, logprobs, is_complete=self._grammars.read(batch[index].sequence, token))
            except GrammarError:
                continue
        return samples

    def forward(self, batch: list[Chunk]) -> list[Tensor]:
        """Fill the KV of every chunk. Returns the last layer's output for each chunk, [num_tokens, hidden_size], in order."""
        with torch.inference_mode():
            return list(torch.split(self._hidden(batch), [chunk.num_tokens for chunk in batch]))

    def _hidden(self, batch: list[Chunk]) -> Tensor:
        """The same, one after another: [tokens of the batch, hidden_size]."""
        assert self._pool is not None, "bind() comes before the first step"
        works = [work for chunk in batch for work in _works(chunk)]
        tokens: list[int] = []
        for chunk in batch:
            tokens += chunk.sequence.tokens[chunk.start : chunk.start + chunk.num_tokens]
        return self._model.forward(works, tokens, self._pool)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab_size] for rows of ``forward``'s output."""
        with torch.inference_mode():
            return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)[:, : self._vocab_size]

    def _score_prompt(self, chunk: Chunk, hidden: Tensor) -> list[TokenLogprobs]:
        num_top = chunk.sequence.params.num_prompt_logprobs
        assert num_top is not None
        targets = chunk.sequence.tokens[chunk.start + 1 : min(chunk.start + chunk.num_tokens + 1, chunk.sequence.num_prompt)]
        scores: list[TokenLogprobs] = []
        for first in range(0, len(targets), _SCORE_ROWS):
            some = targets[first : first + _SCORE_ROWS]
            scores += score(self._logits(hidden[first : first + len(some)]), some, [num_top] * len(some))
        return scores


def _works(chunk: Chunk) -> Iterator[Work]:
    """Prompt and answer apart: what was generated gives the same bits when it is computed anew, as after a failover."""
    sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
    border = min(max(sequence.num_prompt, chunk.start), end)
    if chunk.start < border:
        yield Work(sequence.blocks, chunk.start, border - chunk.start)
    if border < end:
        yield Work(sequence.blocks, border, end - border, is_prompt=False)


def _wants_scores(chunk: Chunk) -> bool:
    return chunk.sequence.params.num_prompt_logprobs is not None and not chunk.sequence.num_generated
