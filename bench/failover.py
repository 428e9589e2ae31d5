"""How long a stream pauses when the worker that decodes it is killed with -9: detection + one prefill of its context.

    python bench/failover.py [--context 500] [--kills 5] [--json -]

Each round streams a fresh prompt (random ids, so that no prefix cache helps), kills the decode worker at the twentieth token,
when prompt and answer together have ``--context`` tokens, and takes the longest gap after that. The prefill that bounds the
pause is the time to the first token of a prompt of that length, on the same server, in turn with the kills. With the prefix
cache on, the surviving prefill worker still has the prompt's blocks and computes only what was generated since.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import time

from clients import random_prompt, stream
from server import RunningServer, report, running_server

AT_TOKEN = 20
DETECTION_S = 0.3


def wait_until_ready(server: RunningServer) -> None:
    while True:
        status = json.loads(server.get("/v1/disagg/status"))
        if all(worker["state"] == "ready" for worker in status["workers"]) and all(pair["verified"] for pair in status["pairs"]):
            return
        time.sleep(0.1)


def one_kill(server: RunningServer, model: str, prompt: list[int]) -> float:
    """The longest gap of a stream whose decode worker is killed, in seconds."""

    def on_token(count: int) -> bool:
        if count == AT_TOKEN:
            status = json.loads(server.get("/v1/disagg/status"))
            decode = next(worker for worker in status["workers"] if worker["role"] == "decode")
            os.kill(decode["pid"], signal.SIGKILL)
        return False

    usage = {"include_usage": True}
    run = asyncio.run(stream(server.url, prompt, 60, model=model, on_token=on_token, stream_options=usage))
    assert run.num_tokens == 60, f"{run.num_tokens} of 60 tokens came"
    return max(run.gaps_s[AT_TOKEN - 1 :])


def measure(context: int, kills: int, *options: str) -> dict[str, object]:
    rng = random.Random()
    with running_server("--max-restarts", "100", *options) as server:
        model = json.loads(server.get("/v1/models"))["data"][0]["id"]
        asyncio.run(stream(server.url, random_prompt(rng, context), 1, model=model))  # warm-up
        prefills, pauses = [], []
        for _ in range(kills):
            wait_until_ready(server)
            prefills.append(asyncio.run(stream(server.url, random_prompt(rng, context), 1, model=model)).ttft_s)
            pauses.append(one_kill(server, model, random_prompt(rng, context - AT_TOKEN)))
    prefill_s, pause_s = statistics.median(prefills), statistics.median(pauses)
    return {
        "pause_s": round(pause_s, 3),
        "pauses_s": [round(pause, 3) for pause in pauses],
        "prefill_s": round(prefill_s, 3),
        "prefills_s": [round(prefill, 3) for prefill in prefills],
        "beyond_prefill_s": round(pause_s - prefill_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--json", help="file to write, or - for bench/results/failover.json")
    args = parser.parse_args()
    result = {
        "context": args.context,
        "target_beyond_prefill_s": DETECTION_S,
        "without_prefix_cache": measure(args.context, args.kills, "--no-prefix-cache"),
        "with_prefix_cache": measure(args.context, args.kills),
    }
    report("failover", result, args.json)


if __name__ == "__main__":
    main()
