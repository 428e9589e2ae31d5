"""Explore fault schedules for a given time: ``python -m tests.sim.explore --minutes 10`` (``make sim MINUTES=10``).

Each round is a new seed of some hundred schedules; the first failure is shrunk, printed and ends the exploration.
"""

from __future__ import annotations

import argparse
import logging
import time

import hypothesis
import structlog

from tests.sim.loop import run_virtual
from tests.sim.schedules import Schedule, play, schedules

ROUND = 250


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    begun, num_schedules, seed = time.monotonic(), 0, args.seed

    def one(schedule: Schedule) -> None:
        nonlocal num_schedules
        num_schedules += 1
        run_virtual(play(schedule))

    settings = hypothesis.settings(
        max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    while time.monotonic() - begun < args.minutes * 60:
        hypothesis.seed(seed)(settings(hypothesis.given(schedule=schedules())(one)))()
        seed += 1
        took_s = time.monotonic() - begun
        print(
            f"seed {seed - 1}: {num_schedules} schedules in {took_s:.0f} s ({num_schedules / took_s:.0f}/s), no failure",
            flush=True,
        )


if __name__ == "__main__":
    main()
