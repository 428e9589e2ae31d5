"""An ordinary client beside one that measures at real-time priority: in a session of its own, as any other program of the host.

    python bench/bystander.py URL MODEL

Streams until SIGTERM, then prints the gaps between its tokens in seconds, a JSON list. Where a server keeps all cores busy, such
a client may be starved although its tokens are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

from clients import random_prompt, stream


def main() -> None:
    url, model = sys.argv[1:]
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    prompt = random_prompt(random.Random(), 32)
    run = asyncio.run(stream(url, prompt, 6000, model=model, on_token=lambda count: bool(ended)))
    print(json.dumps([after - before for before, after in itertools.pairwise(run.arrivals)]))


@contextlib.contextmanager
def bystander(url: str, model: str) -> Iterator[list[float]]:
    """Has one run; its gaps are in the list when it has ended."""
    gaps: list[float] = []
    command = [sys.executable, __file__, url, model]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield gaps
    finally:
        process.terminate()
        gaps += json.loads(process.communicate(timeout=60)[0])


if __name__ == "__main__":
    main()
