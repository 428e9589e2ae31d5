"""Explore fault schedules: ``python -m tests.sim.explore --minutes 10`` (``make sim MINUTES=10``).

Each schedule is drawn from its number, so it is the same on every machine. The first that fails is made as small as it gets, and
printed. ``--mutant NAME`` (or a part of it) plants that bug first, to see how it is found.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
import time
import traceback
from contextlib import nullcontext

import structlog

from tests.sim.mutants.catalogue import MUTANTS
from tests.sim.mutants.mutate import planted
from tests.sim.schedules import draw
from tests.sim.shrink import failure_of, smallest

REPORT_EVERY = 250


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="number of the first schedule")
    parser.add_argument("--mutant", default="", help="one of: " + "; ".join(mutant.name for mutant in MUTANTS))
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    chosen = [mutant for mutant in MUTANTS if args.mutant and args.mutant in mutant.name]
    if args.mutant and len(chosen) != 1:
        parser.error(f"{len(chosen)} mutants have {args.mutant!r} in their names")
    with planted(chosen[0]) if chosen else nullcontext():
        sys.exit(explore(args.minutes, args.seed))


def explore(minutes: float, first: int) -> int:
    """1 when a schedule failed, 0 when the time is over."""
    begun = time.monotonic()
    for num_played, seed in enumerate(itertools.count(first), 1):
        schedule = draw(random.Random(seed))
        if error := failure_of(schedule):
            print(
                f"schedule {seed} fails, after {num_played} in {time.monotonic() - begun:.0f} s; making it smaller …", flush=True
            )
            schedule = smallest(schedule)
            traceback.print_exception(failure_of(schedule) or error)
            print(schedule)
            return 1
        took_s = time.monotonic() - begun
        if num_played % REPORT_EVERY == 0:
            print(f"{num_played} schedules in {took_s:.0f} s ({num_played / took_s:.0f}/s), no failure", flush=True)
        if took_s > minutes * 60:
            return 0
    return 0


if __name__ == "__main__":
    main()
