"""Explore fault schedules: ``python -m tests.sim.explore --minutes 10`` (``make sim MINUTES=10``).

Each schedule is drawn from its number, so it is the same on every machine. The first that fails is made as small as it gets, and
printed. ``--mutant NAME`` (or a part of it) plants that bug first, to see how it is found.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import os
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

ROUND = 250  # schedules from one report to the next


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="number of the first schedule")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: as many as cores)")
    parser.add_argument("--mutant", default="", help="one of: " + "; ".join(mutant.name for mutant in MUTANTS))
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    chosen = [mutant for mutant in MUTANTS if args.mutant and args.mutant in mutant.name]
    if args.mutant and len(chosen) != 1:
        parser.error(f"{len(chosen)} mutants have {args.mutant!r} in their names")
    with planted(chosen[0]) if chosen else nullcontext():
        sys.exit(explore(args.minutes, args.seed, args.jobs))


def explore(minutes: float, first: int, jobs: int) -> int:
    """1 when a schedule failed, 0 when the time is over."""
    begun = time.monotonic()
    with multiprocessing.get_context("fork").Pool(jobs) as pool:  # fork: a planted bug is there too
        for start in itertools.count(first, ROUND):
            failed = [seed for seed, fails in pool.imap_unordered(fails_at, range(start, start + ROUND), chunksize=5) if fails]
            took_s = time.monotonic() - begun
            if failed:
                print(f"schedule {failed[0]} fails, found in {took_s:.0f} s; making it smaller …", flush=True)
                schedule = smallest(draw(random.Random(failed[0])))
                traceback.print_exception(failure_of(schedule))
                print(schedule)
                return 1
            num_played = start + ROUND - first
            print(f"{num_played} schedules in {took_s:.0f} s ({num_played / took_s:.0f}/s), no failure", flush=True)
            if took_s > minutes * 60:
                return 0
    return 0


def fails_at(seed: int) -> tuple[int, bool]:
    return seed, failure_of(draw(random.Random(seed))) is not None


if __name__ == "__main__":
    main()
