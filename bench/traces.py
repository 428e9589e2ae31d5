"""Traces of real requests, read and scaled to what a machine can serve: when each came, how long prompt and answer were.

    Azure CSV        TIMESTAMP,ContextTokens,GeneratedTokens
    Mooncake JSONL   timestamp (ms), input_length, output_length, hash_ids: one per 512 tokens; an id stands for these tokens and
                     all before them, so that equal ids mean equal prefixes

No trace has text: prompts are random token ids. Those of a hash id follow from the id alone, so that a prefix cache finds exactly
what it would have found of the real prompts.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. ``hash_ids`` is empty where the trace does not say which prefixes are equal."""

    at_s: float  # after the trace's first
    num_prompt: int
    num_output: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: float = HASH_BLOCK_TOKENS  # that each hash id stands for


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    attribution: str
    arrivals: list[Arrival]  # in order of time


def read_trace(path: Path) -> Trace:
    """Read a trace, whose format its suffix tells. Raises ValueError for what is neither, with the line that is not right."""
    if path.suffix not in _FORMATS:
        raise ValueError(f"{path}: a trace is {' or '.join(_FORMATS)}")
    parse, attribution = _FORMATS[path.suffix]
    with path.open(encoding="utf-8", newline="") as lines:
        arrivals = sorted(parse(lines), key=lambda arrival: arrival.at_s)
    if not arrivals:
        raise ValueError(f"{path}: no requests")
    begin = arrivals[0].at_s
    return Trace(path.stem, attribution, [replace(arrival, at_s=arrival.at_s - begin) for arrival in arrivals])


def read_azure(lines: Iterable[str]) -> Iterator[Arrival]:
    """Raises ValueError for a line that is not as the head says."""
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # seven digits of a second are one more than datetime has
            arrival = Arrival(at.replace(tzinfo=UTC).timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number}: {error!r}") from error
        yield arrival


def read_mooncake(lines: Iterable[str]) -> Iterator[Arrival]:
    """Raises ValueError for a line that is not as described above."""
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            arrival = Arrival(row["timestamp"] / 1e3, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number}: {error!r}") from error
        yield arrival


_FORMATS: dict[str, tuple[Callable[[Iterable[str]], Iterator[Arrival]], str]] = {
    ".csv": (read_azure, "Azure Public Dataset, LLM inference trace 2023, CC-BY 4.0; published with Splitwise (ISCA 2024)"),
    ".jsonl": (read_mooncake, "Mooncake trace, FAST 2025 release, Apache-2.0"),
}


def scaled(arrivals: Iterable[Arrival], *, rate: float, length: float, duration_s: float, begin_s: float = 0.0) -> list[Arrival]:
    """What comes within ``duration_s`` at ``rate`` times the trace's rate, prompts and answers ``length`` times as long.

    ``begin_s`` is in the trace's own time.
    """
    return [
        replace(
            arrival,
            at_s=(arrival.at_s - begin_s) / rate,
            num_prompt=max(1, round(arrival.num_prompt * length)),
            num_output=max(1, round(arrival.num_output * length)),
            block_tokens=arrival.block_tokens * length,
        )
        for arrival in arrivals
        if 0 <= (arrival.at_s - begin_s) / rate < duration_s
    ]


def fitted(arrival: Arrival, max_context: int) -> Arrival:
    """Cut to a server's context: the answer to half of it at most, then the end of the prompt to what is left."""
    num_output = min(arrival.num_output, max_context // 2)
    return replace(arrival, num_output=num_output, num_prompt=min(arrival.num_prompt, max_context - num_output))


def prompt_tokens(arrival: Arrival, token_ids: range, seed: int, rng: random.Random) -> list[int]:
    """Ids out of ``token_ids`` for the prompt: they follow from its hash ids and ``seed``, and from ``rng`` where it has none."""
    tokens: list[int] = []
    for index, hash_id in enumerate(arrival.hash_ids):
        if len(tokens) >= arrival.num_prompt:
            break
        end = round((index + 1) * arrival.block_tokens)  # an id has the same place in all its prompts
        tokens += random.Random(f"{seed} {hash_id}").choices(token_ids, k=end - len(tokens))
    return tokens[: arrival.num_prompt] + rng.choices(token_ids, k=max(0, arrival.num_prompt - len(tokens)))
