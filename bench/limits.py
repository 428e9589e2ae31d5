"""What this machine could do with the model at most, for comparison with what servers do: printed as JSON.

    python bench/limits.py [--model smollm2] [--prompts 512,2000]

Decode of one stream: the bytes of every weight once a token (KV is little in short contexts) at the measured rate of reading.
Prefill: the useful float operations at the measured rate of torch's matrix products in float32. Both on all cores.
"""

from __future__ import annotations

import argparse
import json

from decode import measure_reading, weight_nbytes
from prefill import measure_products, useful_operations

from disagg.model import find_model, read_model_spec

CHUNK = 512  # rows of the products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", default="512,2000")
    args = parser.parse_args()
    files = find_model(args.model)
    spec = read_model_spec(files)
    reading, products = measure_reading(), measure_products(spec, CHUNK)["torch_mm"]
    prefill = {}
    for prompt in map(int, args.prompts.split(",")):
        seconds = useful_operations(spec, prompt) / 1e9 / products
        prefill[str(prompt)] = {"ttft_s": round(seconds, 3), "tokens_per_s": round(prompt / seconds, 1)}
    tokens_per_s = round(reading * 1e9 / weight_nbytes(files, spec), 1)
    rates = {"reading_gb_per_s": round(reading, 1), "torch_mm_gflop_per_s": round(products, 1)}
    print(json.dumps({**rates, "decode": {"1": {"tokens_per_s": tokens_per_s}}, "prefill": prefill}))


if __name__ == "__main__":
    main()
