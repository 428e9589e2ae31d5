"""Fault schedules drawn by hypothesis, on a virtual clock. A failure prints the schedule; the same schedule repeats exactly."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.loop import DeadlockError, run_virtual
from tests.sim.schedules import KINDS, Client, Fault, Schedule, draw, play, undisturbed


@given(seed=st.integers(0, 2**32))
def test_whatever_goes_wrong_streams_are_right_and_nothing_is_left(seed: int) -> None:
    """Deaths, held and lost copies, slow peers, small pools, lost and late messages, clients that leave: the rules hold.

    ``python -m tests.sim.explore --seed SEED`` makes a schedule that fails small.
    """
    assert run_virtual(play(draw(random.Random(seed))))


def test_an_abort_while_waiting_for_blocks_lets_the_next_request_on() -> None:
    """Found by exploration: the place of a reservation that was given up must wake the queue, without any other event."""
    clients = (Client(0.0, 1, 2, 0, 0.0), Client(0.0, 6, 2, 0, None))
    assert run_virtual(play(Schedule(1, 1, 3, 40, False, False, clients, ())))


EXAMPLE = Schedule(
    num_prefill=2,
    num_decode=2,
    chunk_tokens=8,
    num_blocks=64,
    prefix_cache=True,
    fallback=True,
    clients=tuple(Client(0.01 * index, 30 + index, 40, index % 3, 0.3 if index == 4 else None) for index in range(6)),
    faults=(Fault("kill", 0.05, 0, 0.0), Fault("hang", 0.1, 3, 0.0), Fault("hold", 0.02, 3, 0.2), Fault("lag", 0.0, 1, 0.3)),
)


def test_the_same_schedule_gives_the_same_trace() -> None:
    """Every message at the same virtual time, in the same order: a failure can be looked at twice."""
    first, second = run_virtual(play(EXAMPLE)), run_virtual(play(EXAMPLE))
    assert first == second
    assert {"prefill-0", "decode-0"} <= {worker for _, worker, _ in first}
    assert any(message.startswith("Pushed") for _, _, message in first)


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_does_what_it_says(kind: str) -> None:
    """A fault that changes nothing would make every run pass: each must leave its mark, where it may on the trace."""
    clients = (Client(0.0, 50, 40, 1, None), Client(0.02, 50, 40, 2, None))
    calm = Schedule(1, 1, 8, 40, False, True, clients, (), is_two_sided=kind == "lose")
    on_decode = kind in ("slow", "lag", "squeeze")
    faulty = replace(calm, faults=(Fault(kind, 0.031, 1 if on_decode else 0, 0.5),))
    before, after = (
        [entry for entry in run_virtual(play(schedule)) if not entry[2].startswith("Stats")] for schedule in (calm, faulty)
    )
    assert (before == after) == (kind == "duplicate"), "a duplicate is the one fault that nobody above the channel may notice"


def test_a_hang_is_found() -> None:
    """Waiting for what nobody will do is an error of the loop, not an endless test."""
    with pytest.raises(DeadlockError):
        run_virtual(asyncio.Event().wait())


def test_minutes_pass_in_no_time() -> None:
    """Sleeping is free, and time still moves forward."""

    async def sleep() -> float:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await asyncio.sleep(3600)
        return loop.time() - begun

    assert run_virtual(sleep()) == pytest.approx(3600)


def test_the_reference_is_the_engines_own_word() -> None:
    """Tokens are printable, depend on the whole prompt, and a longer answer begins like a shorter one."""
    prompt = (65, 66, 67)
    assert all(32 <= token < 127 for token in undisturbed(prompt, 20))
    assert undisturbed(prompt, 20)[:5] == undisturbed(prompt, 5)
    assert undisturbed((65, 66, 68), 20) != undisturbed(prompt, 20)
