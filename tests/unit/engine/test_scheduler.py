"""The scheduler's budgets, fairness and books, with a stand-in for the engine that only counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.base import Chunk, Sample, Sequence
from disagg.engine.blocks import BlockPool, BlockState
from disagg.engine.scheduler import Progress, Scheduler
from disagg.request import FinishReason, SamplingParams

BLOCK_SIZE = 4


def make_scheduler(
    *, num_blocks: int = 32, chunk_tokens: int = 16, max_num_seqs: int = 8, prefix_cache: bool = True
) -> Scheduler:
    pool = BlockPool(num_blocks)
    return Scheduler(pool, block_size=BLOCK_SIZE, chunk_tokens=chunk_tokens, max_num_seqs=max_num_seqs, prefix_cache=prefix_cache)


def make_sequence(
    dispatch: int, num_prompt: int, max_tokens: int, *, prefill_only: bool = False, salt: int = 0, priority: int = 0
) -> Sequence:
    prompt, params = [1000 + salt + i for i in range(num_prompt)], SamplingParams(max_tokens=max_tokens)
    return Sequence(dispatch, prompt, params, num_prompt=num_prompt, prefill_only=prefill_only, priority=priority)


def next_token(tokens: list[int]) -> int:
    """What the stand-in's model says: a function of all tokens before, as a real one's is."""
    return hash(tuple(tokens)) % 997


def step(scheduler: Scheduler) -> tuple[list[Chunk], list[Progress]]:
    batch = scheduler.schedule()
    assert scheduler.waiting == sorted(scheduler.waiting, key=lambda s: (s.priority, s.dispatch))
    for chunk in batch:
        blocks = chunk.sequence.blocks
        assert len(blocks) * BLOCK_SIZE >= chunk.start + chunk.num_tokens, "a chunk without slots for its tokens"
        assert chunk.start == chunk.sequence.num_computed
    samples = [Sample(next_token(c.sequence.tokens) if c.is_last else None) for c in batch]
    return batch, scheduler.commit(batch, samples)


def run_to_end(scheduler: Scheduler, limit: int = 2000) -> list[Progress]:
    done = []
    for _ in range(limit):
        if not scheduler.has_work:
            return done
        batch, results = step(scheduler)
        assert batch, f"work but nothing scheduled: {scheduler!r}"
        done += [progress for progress in results if progress.finish_reason]
    raise AssertionError(f"not finished after {limit} steps: {scheduler!r}")


def expected_tokens(num_prompt: int, max_tokens: int, salt: int) -> list[int]:
    tokens = [1000 + salt + i for i in range(num_prompt)]
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens


@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=8),
    num_blocks=st.integers(18, 40),
    chunk_tokens=st.integers(1, 24),
    max_num_seqs=st.integers(1, 8),
    prefix_cache=st.booleans(),
)
def test_whatever_the_budgets_tokens_are_the_same_and_every_block_comes_back(
    requests: list[tuple[int, int, int]], num_blocks: int, chunk_tokens: int, max_num_seqs: int, prefix_cache: bool
) -> None:
    """Chunking, batching, preemption and prefix hits change no token; nobody starves; at the end the pool is idle."""
    scheduler = make_scheduler(
        num_blocks=num_blocks, chunk_tokens=chunk_tokens, max_num_seqs=max_num_seqs, prefix_cache=prefix_cache
    )
    sequences = [make_sequence(i, p, m, salt=s) for i, (p, m, s) in enumerate(requests)]
    for sequence in sequences:
        scheduler.add(sequence)
    done = run_to_end(scheduler)
    assert sorted(progress.sequence.dispatch for progress in done) == list(range(len(requests)))
    for sequence, (num_prompt, max_tokens, salt) in zip(sequences, requests, strict=True):
        assert sequence.tokens == expected_tokens(num_prompt, max_tokens, salt)
    assert scheduler.pool.is_idle


@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=6),
    chunk_tokens=st.integers(1, 16),
)
def test_budgets_are_never_exceeded(requests: list[tuple[int, int]], chunk_tokens: int) -> None:
    """Prompt tokens of one step stay within chunk_tokens; running sequences within max_num_seqs; one chunk a sequence."""
    scheduler = make_scheduler(num_blocks=24, chunk_tokens=chunk_tokens, max_num_seqs=3)
    for index, (num_prompt, max_tokens) in enumerate(requests):
        scheduler.add(make_sequence(index, num_prompt, max_tokens, salt=100 * index))
    while scheduler.has_work:
        generated = {s.dispatch: s.num_generated for s in [*scheduler.running, *scheduler.waiting]}
        batch, _ = step(scheduler)
        prompt_tokens = sum(c.num_tokens for c in batch if c.num_tokens > 1 or not generated[c.sequence.dispatch])
        assert prompt_tokens <= chunk_tokens
        assert len(scheduler.running) <= 3
        assert len({c.sequence.dispatch for c in batch}) == len(batch)


def test_running_streams_come_first_in_every_step() -> None:
    """A long prompt beside a stream never makes the stream miss a step."""
    scheduler = make_scheduler(num_blocks=64, chunk_tokens=8)
    stream = make_sequence(1, 4, 20)
    scheduler.add(stream)
    step(scheduler)
    scheduler.add(make_sequence(2, 60, 1, salt=500))
    for expected in range(2, 9):
        batch, _ = step(scheduler)
        assert batch[0].sequence is stream
        assert batch[1].num_tokens == min(8, 60 - 8 * (expected - 2))
        assert stream.num_generated == expected


def test_the_last_admitted_stream_yields_when_another_must_grow() -> None:
    """Preemption takes the youngest; it is computed again and counted, and both end with the right tokens."""
    scheduler = make_scheduler(num_blocks=6, prefix_cache=False)
    old, young = make_sequence(1, 8, 12), make_sequence(2, 8, 8, salt=50)
    scheduler.add(old)
    scheduler.add(young)
    run_to_end(scheduler)
    assert scheduler.num_preemptions >= 1
    assert scheduler.num_recomputed_tokens >= 8
    assert old.tokens == expected_tokens(8, 12, 0)
    assert young.tokens == expected_tokens(8, 8, 50)
    assert scheduler.pool.is_idle


def test_a_preempted_stream_outranks_those_that_came_after_it() -> None:
    """It gets its blocks back before a younger stream may end: the younger one yields in turn, and both say the same."""
    scheduler = make_scheduler(num_blocks=10, prefix_cache=False)
    old = make_sequence(1, 8, 24)
    scheduler.add(old)
    step(scheduler)
    reserved = scheduler.pool.allocate(7, BlockState.RESERVED)  # for one that is being computed elsewhere
    while old in scheduler.running:
        step(scheduler)
    young = make_sequence(2, 24, 3, salt=50)
    young.tokens = expected_tokens(24, 1, 50)
    young.blocks, young.num_computed = reserved, 24
    scheduler.pool.use(reserved)
    scheduler.adopt(young)
    step(scheduler)
    assert old in scheduler.running
    assert young in scheduler.waiting
    run_to_end(scheduler)
    assert old.tokens == expected_tokens(8, 24, 0)
    assert young.tokens == expected_tokens(24, 3, 50)
    assert scheduler.pool.is_idle


@given(priorities=st.lists(st.integers(-2, 2), min_size=1, max_size=12), max_num_seqs=st.integers(1, 3))
def test_prompts_start_by_priority_and_among_equals_by_age(priorities: list[int], max_num_seqs: int) -> None:
    """Whatever the order in which they come, and never more than may run at once."""
    scheduler = make_scheduler(num_blocks=64, chunk_tokens=64, max_num_seqs=max_num_seqs)
    for dispatch, priority in enumerate(priorities):
        scheduler.add(make_sequence(dispatch, 5, 3, salt=100 * dispatch, priority=priority))
    started: list[int] = []
    while scheduler.has_work:
        batch, _ = step(scheduler)
        started += [chunk.sequence.dispatch for chunk in batch if chunk.start == 0]
    assert started == sorted(range(len(priorities)), key=lambda dispatch: (priorities[dispatch], dispatch))


def test_what_runs_goes_on_when_something_more_urgent_comes() -> None:
    """A prompt that waits takes no blocks from a stream, however urgent it is: it starts when the stream has ended."""
    scheduler = make_scheduler(num_blocks=6, prefix_cache=False)
    running, urgent = make_sequence(1, 8, 12, priority=9), make_sequence(2, 16, 2, salt=50, priority=-9)
    scheduler.add(running)
    step(scheduler)
    scheduler.add(urgent)
    ended = [progress.sequence for progress in run_to_end(scheduler)]
    assert (ended, scheduler.num_preemptions) == ([running, urgent], 0)


def test_the_least_urgent_stream_yields_even_if_it_is_older() -> None:
    """Where blocks run out somebody has to give them back; age decides only among equals."""
    scheduler = make_scheduler(num_blocks=6, prefix_cache=False)
    patient, urgent = make_sequence(1, 8, 12, priority=1), make_sequence(2, 8, 8, salt=50)
    scheduler.add(patient)
    scheduler.add(urgent)
    while patient in scheduler.running or not patient.num_generated:
        step(scheduler)
        assert urgent in scheduler.running or not urgent.num_generated
    run_to_end(scheduler)
    assert patient.tokens == expected_tokens(8, 12, 0)
    assert urgent.tokens == expected_tokens(8, 8, 50)
    assert scheduler.pool.is_idle


def test_a_sequences_own_blocks_are_no_prefix_hits() -> None:
    """What is found again after a preemption was computed for this very request: it counts as cached for nobody."""
    scheduler = make_scheduler(num_blocks=12, chunk_tokens=8)
    old, young = make_sequence(1, 8, 30), make_sequence(2, 20, 20, salt=50)
    scheduler.add(old)
    step(scheduler)
    scheduler.add(young)
    run_to_end(scheduler)
    assert scheduler.num_preemptions > 0
    assert (old.num_cached, young.num_cached, scheduler.num_prefix_hits) == (0, 0, 0)


def test_a_broken_output_ends_its_sequence_only() -> None:
    """Logits that are no numbers give no token: ERROR for that one, the others go on."""
    scheduler = make_scheduler()
    broken, whole = make_sequence(1, 4, 5), make_sequence(2, 4, 5, salt=50)
    scheduler.add(broken)
    scheduler.add(whole)
    batch = scheduler.schedule()
    results = scheduler.commit(batch, [Sample(None, is_broken=True), Sample(next_token(whole.tokens))])
    assert [progress.finish_reason for progress in results] == [FinishReason.ERROR, None]
    run_to_end(scheduler)
    assert whole.tokens == expected_tokens(4, 5, 50)
    assert scheduler.pool.is_idle


def test_without_preemption_nothing_is_computed_twice() -> None:
    """num_recomputed_tokens is the metric that catches silent recomputation: it stays 0 in ordinary work."""
    scheduler = make_scheduler(num_blocks=64)
    for index in range(4):
        scheduler.add(make_sequence(index, 10 + index, 10, salt=100 * index))
    run_to_end(scheduler)
    assert (scheduler.num_preemptions, scheduler.num_recomputed_tokens) == (0, 0)


def test_an_equal_prompt_hits_all_its_blocks_but_computes_its_last_token() -> None:
    """Block-aligned prompts too: logits of the last token are needed, so its block is computed."""
    scheduler = make_scheduler()
    first, second, third = make_sequence(1, 16, 1), make_sequence(2, 16, 1), make_sequence(3, 18, 1)
    for sequence in (first, second, third):
        scheduler.add(sequence)
        run_to_end(scheduler)
    assert (first.num_cached, second.num_cached, third.num_cached) == (0, 12, 16)
    assert (scheduler.num_prefix_queries, scheduler.num_prefix_hits) == (3 + 3 + 4, 0 + 3 + 4)


def test_scoring_a_prompt_turns_prefix_hits_off() -> None:
    """Log-probabilities of prompt tokens need every position computed."""
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, 16, 1))
    run_to_end(scheduler)
    scored = Sequence(2, [1000 + i for i in range(16)], SamplingParams(max_tokens=1, num_prompt_logprobs=0), num_prompt=16)
    scheduler.add(scored)
    batch, _ = step(scheduler)
    assert [(c.start, c.num_tokens) for c in batch] == [(0, 16)]


def test_a_prefill_only_sequence_leaves_with_its_blocks() -> None:
    """The hand-over still reads them: the scheduler must not give them back."""
    scheduler = make_scheduler()
    sequence = make_sequence(1, 10, 5, prefill_only=True)
    scheduler.add(sequence)
    _, results = step(scheduler)
    assert (results[0].finish_reason, sequence.num_generated, scheduler.has_work) == (None, 1, False)
    assert scheduler.pool.counts[BlockState.IN_USE] == 3
    scheduler.pool.release(sequence.blocks)
    assert scheduler.pool.is_idle


def test_adopted_sequences_decode_without_computing_their_prompt() -> None:
    """A handed-over sequence's first step here computes one token."""
    scheduler = make_scheduler()
    sequence = make_sequence(1, 10, 3)
    sequence.blocks = scheduler.pool.allocate(3, BlockState.IN_USE)
    sequence.num_computed = 10
    sequence.tokens.append(next_token(sequence.tokens))
    scheduler.adopt(sequence)
    batch, _ = step(scheduler)
    assert [(c.start, c.num_tokens) for c in batch] == [(10, 1)]
    run_to_end(scheduler)
    assert sequence.tokens == expected_tokens(10, 3, 0)
    assert scheduler.num_recomputed_tokens == 0


def test_removing_in_any_phase_leaves_nothing() -> None:
    """Waiting, half prefilled, decoding: what is removed holds its blocks, and releasing them empties the pool."""
    for num_steps in range(5):
        scheduler = make_scheduler(chunk_tokens=4)
        sequence = make_sequence(1, 10, 5)
        scheduler.add(sequence)
        for _ in range(num_steps):
            step(scheduler)
        scheduler.remove(sequence)
        scheduler.pool.release(sequence.blocks)
        assert not scheduler.has_work
        assert scheduler.pool.is_idle


def test_stop_tokens_end_a_sequence_unless_more_is_owed() -> None:
    """A stop id ends it with STOP once min_tokens are there; max_tokens ends it with LENGTH."""
    tokens = [1000 + i for i in range(4)]
    first = next_token(tokens)
    for min_tokens, reason, generated in ((0, FinishReason.STOP, 1), (2, FinishReason.LENGTH, 3)):
        scheduler = make_scheduler()
        params = SamplingParams(max_tokens=3, min_tokens=min_tokens, stop_token_ids=(first,))
        sequence = Sequence(1, list(tokens), params, num_prompt=4)
        scheduler.add(sequence)
        (done,) = run_to_end(scheduler)
        assert (done.finish_reason, sequence.num_generated) == (reason, generated)
