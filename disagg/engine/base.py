"""What a worker needs of an engine, and the pieces of work it is given. Pure: the scheduler and the null engine need no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from disagg.grammar import Matcher
from disagg.kv import KVLayout
from disagg.messages import TokenLogprobs
from disagg.request import SamplingParams

Progress = Callable[[float, str], None]
"""Called while loading with the fraction done (0..1) and what is being done."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One dispatch inside a worker: its tokens, and how far their KV is computed.

    ``tokens`` is prompt + generated. KV exists for ``tokens[:num_computed]``, at slot ``i % block_size`` of
    ``blocks[i // block_size]``. The last token of a decoding sequence is sampled but not computed yet.
    """

    dispatch: int
    tokens: list[int]
    params: SamplingParams
    num_prompt: int
    priority: int = 0  # its request's
    prefill_only: bool = False  # it leaves after its first token
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks of tokens, as far as they were needed
    num_computed: int = 0
    num_cached: int | None = None  # prompt tokens found in the prefix cache when it was first given blocks
    was_whole: bool = False  # KV of all its tokens has existed: computing any but the newest is doing it again
    is_filling: bool = False  # its blocks are being computed here; false once every token but the last has KV
    matcher: Matcher | None = None  # has read all that was generated; the engine makes it for the first token it samples

    @property
    def rank(self) -> tuple[int, int]:
        """Whose is lower goes first, and gives its blocks back last: by priority, among equals by age."""
        return self.priority, self.dispatch

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute KV for ``sequence.tokens[start : start + num_tokens]``; if it ``is_last``, sample the token after them."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """The sequence has no token after this chunk: its logits give the next one."""
        return self.start + self.num_tokens == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Sample:
    """What a step produced for one chunk.

    ``token`` is None unless the chunk was its sequence's last and ``params.max_tokens`` > 0. ``prompt_logprobs`` has, when
    the request asked for them, an entry for each prompt token ``start + 1 … start + num_tokens`` that exists.
    """

    token: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    is_broken: bool = False  # nothing could be sampled: there is no token, and there will be none
    is_complete: bool = False  # the request's grammar allows nothing after this token


class Engine(Protocol):
    """A model, its KV pool and its sampler. Synchronous; one caller.

    The pool's memory is given by the worker (``bind``), because the hand-over must be able to share it.
    """

    layout: KVLayout

    def bind(self, pool: memoryview) -> None:
        """Use ``pool`` (``num_blocks * layout.block_nbytes`` bytes, writable) as the KV pool. Called once, before any step."""
        ...

    def step(self, batch: list[Chunk]) -> list[Sample]:
        """One forward pass. Fills the KV of every chunk and returns one Sample per chunk, in order.

        Chunks of one batch belong to different sequences; each sequence's ``blocks`` cover the chunk's slots.
        """
        ...
