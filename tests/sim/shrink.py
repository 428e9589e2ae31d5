"""Makes a schedule that fails small enough to be understood: clients and faults are left out, the world is made plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.sim.loop import run_virtual
from tests.sim.schedules import Schedule, play

PLAIN = {
    "num_prefill": 1, "num_decode": 1, "is_two_sided": False, "verify_kv": True, "prefix_cache": False, "num_blocks": 200,
    "chunk_tokens": 8, "fallback": True,
}  # fmt: skip
PLAIN_CLIENT = {"leaves_after_s": None, "prompt": 0, "at_s": 0.0, "num_prompt": 20, "max_tokens": 20}


def failure_of(schedule: Schedule) -> Exception | None:
    """What is wrong with this world when the schedule is played; a group of one is unwrapped."""
    try:
        run_virtual(play(schedule))
    except Exception as error:
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            (error,) = error.exceptions
        return error
    return None


def smallest(schedule: Schedule, fails: Callable[[Schedule], object] = failure_of) -> Schedule:
    """The first of the simpler schedules that ``fails`` as well, and so on until none does."""
    while True:
        for simpler in _simpler(schedule):
            if simpler != schedule and fails(simpler):
                schedule = simpler
                break
        else:
            return schedule


def _simpler(schedule: Schedule) -> Iterator[Schedule]:
    clients, faults = schedule.clients, schedule.faults
    for index in range(len(faults)):
        yield replace(schedule, faults=faults[:index] + faults[index + 1 :])
    if len(clients) > 1:
        for index in range(len(clients)):
            yield replace(schedule, clients=clients[:index] + clients[index + 1 :])
    for name, value in PLAIN.items():
        yield replace(schedule, **{name: value})
    for index, client in enumerate(clients):
        for name, value in PLAIN_CLIENT.items():
            yield replace(schedule, clients=(*clients[:index], replace(client, **{name: value}), *clients[index + 1 :]))
    for index, fault in enumerate(faults):
        for simpler in (
            replace(fault, is_inbound=False),
            replace(fault, for_s=round(fault.for_s, 1)),
            replace(fault, at_s=round(fault.at_s, 1)),
        ):
            yield replace(schedule, faults=(*faults[:index], simpler, *faults[index + 1 :]))
