"""Chooses what a worker computes next: continuous batching with chunked prefill, under token and block budgets.

A sequence waits, gets blocks for its whole prompt (less what the prefix cache holds), is computed chunk by chunk, and then
decodes one token per step. Running streams come first in every step; prompts take up to ``chunk_tokens`` beside them. When
a stream cannot grow, the sequence that is last in rank gives its blocks back and is computed again later (preemption): its draws
depend on seed and position only, so its tokens do not change. Rank is the client's priority and, among equals, age, which is the
dispatch number; so whoever is first always gets on. A prompt that waits takes no blocks from others, whatever its rank.

Pure: no torch, no clock. A step is ``schedule`` → engine → ``commit``.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

from disagg.engine.base import Chunk, Sample, Sequence
from disagg.engine.blocks import BlockPool, BlockState
from disagg.kv import block_hashes
from disagg.messages import TokenOutput
from disagg.request import FinishReason

GROWTH_BLOCKS = 4
"""Blocks that each running stream should have left to grow into when others reserve: about a prefill's worth of steps."""

RANK = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did for one sequence. ``finish_reason`` is set when it has left the scheduler for good."""

    sequence: Sequence
    chunk: Chunk
    sample: Sample
    finish_reason: FinishReason | None

    @property
    def output(self) -> TokenOutput | None:
        """What the parent is told: the token, or (ERROR) that there is none. None when nothing was to be sampled."""
        if self.sample.token is None and not self.sample.is_broken:
            return None
        return TokenOutput(self.sequence.dispatch, self.sample.token or 0, self.finish_reason, self.sample.logprobs)


class Scheduler:
    """``waiting`` is in order of rank, ``running`` in order of admission."""

    def __init__(self, pool: BlockPool, *, block_size: int, chunk_tokens: int, max_num_seqs: int, prefix_cache: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.chunk_tokens = chunk_tokens
        self.max_num_seqs = max_num_seqs
        self.prefix_cache = prefix_cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # full prompt blocks looked up …
        self.num_prefix_hits = 0  # … and found
        self.num_recomputed_tokens = 0  # whose KV had existed before

    def __repr__(self) -> str:
        return f"Scheduler(waiting {len(self.waiting)}, running {len(self.running)}, {self.pool!r})"

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose prompt is to be computed here."""
        insort(self.waiting, sequence, key=RANK)

    def adopt(self, sequence: Sequence) -> None:
        """Go on decoding a sequence whose blocks already hold all but its last token."""
        sequence.was_whole = True
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever it is doing. Its blocks stay with it: the caller releases them."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def allocate(self, sequence: Sequence, *, num_tokens: int, reusable: int, spare: int, state: BlockState) -> bool:
        """Blocks for ``num_tokens`` tokens: cached ones for at most the first ``reusable`` of them, new ones after.

        The new blocks enter ``state``. False, with nothing taken, when fewer than ``spare`` blocks would remain available.
        """
        hits: list[int] = []
        wanted: list[bytes] = []
        scores_prompt = sequence.params.num_prompt_logprobs is not None and not sequence.num_generated
        if self.prefix_cache and not scores_prompt:
            sequence.hashes = block_hashes(sequence.tokens, self.block_size, sequence.hashes)
            wanted = sequence.hashes[: reusable // self.block_size]
            hits = self.pool.match(wanted)
        needed = -(-num_tokens // self.block_size) - len(hits)
        if self.pool.num_available < needed + spare:
            self.pool.release(hits)
            return False
        sequence.blocks = hits + self.pool.allocate(needed, state)
        sequence.num_computed = len(hits) * self.block_size
        if sequence.num_cached is None:  # after a preemption it would find its own blocks
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            self.num_prefix_queries += len(wanted)
            self.num_prefix_hits += len(hits)
        return True

    def schedule(self) -> list[Chunk]:
        """The next step's chunks: every stream's next token, then prompts up to the token budget."""
        self._make_room_for_the_preempted()
        batch = [
            Chunk(sequence, sequence.num_computed, 1)
            for sequence in list(self.running)
            if not sequence.is_filling and sequence.blocks and self._grow(sequence)
        ]
        # A later stream may have been preempted to let an earlier one grow, and the other way round.
        batch = [chunk for chunk in batch if chunk.sequence.blocks]
        budget = self.chunk_tokens
        for sequence in self.running:
            if budget and sequence.is_filling:
                budget -= self._take(sequence, budget, batch)
        while budget and self.waiting and len(self.running) < self.max_num_seqs and self._admit(self.waiting[0]):
            sequence = self.waiting.pop(0)
            self.running.append(sequence)
            budget -= self._take(sequence, budget, batch)
        return batch

    def commit(self, batch: list[Chunk], samples: list[Sample]) -> list[Progress]:
        """Book a step's results: tokens appended, whole blocks published, finished sequences let go.

        The blocks of a finished sequence are released, unless it is ``prefill_only``: then the hand-over still reads them
        and releases them itself.
        """
        return [self._commit_one(chunk, sample) for chunk, sample in zip(batch, samples, strict=True)]

    def publish(self, sequence: Sequence, first: int = 0) -> None:
        """Make the whole blocks of ``sequence``, from its ``first`` on, findable as far as they are computed."""
        if self.prefix_cache:
            num_whole = sequence.num_computed // self.block_size
            sequence.hashes = block_hashes(sequence.tokens, self.block_size, sequence.hashes)
            for index in range(first, num_whole):
                self.pool.publish(sequence.blocks[index], sequence.hashes[index])

    def _take(self, sequence: Sequence, budget: int, batch: list[Chunk]) -> int:
        count = min(budget, sequence.num_uncomputed)
        batch.append(Chunk(sequence, sequence.num_computed, count))
        return count

    def _admit(self, sequence: Sequence) -> bool:
        """Blocks for all tokens of a waiting sequence, if they leave each running one a block to grow into."""
        num_tokens = len(sequence.tokens)
        is_admitted = self.allocate(
            sequence,
            num_tokens=num_tokens,
            reusable=num_tokens - 1,  # the last token is computed in any case: its logits are wanted
            spare=len(self.running),
            state=BlockState.FILLING,
        )
        if is_admitted:
            sequence.is_filling = True
        return is_admitted

    def _make_room_for_the_preempted(self) -> None:
        """A stream that had to give its blocks back takes those of the streams behind it in rank, from the last one on."""
        if not self.waiting or not self.waiting[0].num_generated:
            return
        first = self.waiting[0]
        while self.pool.num_available < -(-len(first.tokens) // self.block_size) + len(self.running):
            behind = [s for s in self.running if s.rank > first.rank and not s.prefill_only]
            if not behind:
                return
            self._preempt(max(behind, key=RANK))

    def _grow(self, sequence: Sequence) -> bool:
        """A slot for the token about to be computed, at the cost of others if need be. False: it was preempted itself."""
        if len(sequence.blocks) * self.block_size > sequence.num_computed:
            return True
        while not self.pool.num_available:
            victim = max((s for s in self.running if not s.prefill_only), key=RANK)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.allocate(1, BlockState.IN_USE)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed, sequence.is_filling = [], 0, False
        insort(self.waiting, sequence, key=RANK)
        self.num_preemptions += 1

    def _commit_one(self, chunk: Chunk, sample: Sample) -> Progress:
        sequence, is_last = chunk.sequence, chunk.is_last
        if sequence.was_whole:
            self.num_recomputed_tokens += chunk.num_tokens - is_last
        sequence.was_whole = sequence.was_whole or is_last
        sequence.num_computed = chunk.start + chunk.num_tokens
        first, num_whole = chunk.start // self.block_size, sequence.num_computed // self.block_size
        if sequence.is_filling:
            self.pool.use(sequence.blocks[first : None if is_last else num_whole])
            sequence.is_filling = not is_last
        if num_whole > first:
            self.publish(sequence, first)
        reason = self._append(sequence, sample) if is_last else None
        if reason or (is_last and sequence.prefill_only):
            self.running.remove(sequence)
            if not sequence.prefill_only:
                self.pool.release(sequence.blocks)
                sequence.blocks = []
        return Progress(sequence, chunk, sample, reason)

    @staticmethod
    def _append(sequence: Sequence, sample: Sample) -> FinishReason | None:
        params = sequence.params
        if sample.is_broken:
            return FinishReason.ERROR
        if sample.token is None:
            return FinishReason.LENGTH
        sequence.tokens.append(sample.token)
        if sample.is_complete or (sample.token in params.stop_token_ids and sequence.num_generated > params.min_tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.num_generated >= params.max_tokens else None
