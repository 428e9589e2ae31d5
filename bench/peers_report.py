"""What a sitting of peers.py found: medians, ratios against targets as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Record = dict[str, Any]  # of one server, as in the JSON


class Figure(NamedTuple):
    title: str
    unit: str
    is_less_better: bool = False


FIGURES = {  # by the path to it in a run, or in a server's record
    "decode.1.tokens_per_s": Figure("decode, 1 stream", "tokens/s"),
    "decode.1.itl_p50_ms": Figure("ITL p50, 1 stream", "ms", True),
    "decode.4.tokens_per_s": Figure("decode, 4 streams", "tokens/s"),
    "decode.4.itl_p50_ms": Figure("ITL p50, 4 streams", "ms", True),
    "decode.16.tokens_per_s": Figure("decode, 16 streams", "tokens/s"),
    "decode.16.itl_p50_ms": Figure("ITL p50, 16 streams", "ms", True),
    "prefill.512.tokens_per_s": Figure("prefill of 512 tokens", "tokens/s"),
    "prefill.2000.tokens_per_s": Figure("prefill of 2,000 tokens", "tokens/s"),
    "interference.itl_p50_ms": Figure("beside long prompts: ITL p50", "ms", True),
    "interference.itl_p99_ms": Figure("beside long prompts: ITL p99", "ms", True),
    "interference.itl_max_ms": Figure("beside long prompts: longest ITL", "ms", True),
    "interference.tokens_per_s": Figure("beside long prompts: the streams together", "tokens/s"),
    "interference.long_ttft_s": Figure("TTFT of the long prompts", "s", True),
    "ready_s": Figure("command to first answer", "s", True),
    "rest_mib": Figure("resident memory at rest (sum of PSS)", "MiB", True),
    "busy_mib": Figure("resident memory after the runs", "MiB", True),
    "idle_cores": Figure("cores used at rest", "", True),
    "busy_cores": Figure("cores used during the runs", "", True),
    "processes": Figure("processes", "", True),
    "lag_max_ms": Figure("the probe's own worst lag", "ms", True),
}


def values(record: Record, path: str) -> list[float]:
    """The figure of every run, or the only one of the server; none where it was not measured."""
    found = (_dig(part, path.split(".")) for part in [record, *record["runs"]])
    return [value for value in found if value is not None]


def _dig(part: Any, path: Sequence[str]) -> float | None:
    for key in path:
        if not isinstance(part, dict) or key not in part:
            return None
        part = part[key]
    return float(part)


def ratio(figure: str, ours: Record, theirs: Record) -> float | None:
    """How many times better our median is; None where either was not measured."""
    ours_values, theirs_values = values(ours, figure), values(theirs, figure)
    if not ours_values or not theirs_values:
        return None
    times = statistics.median(ours_values) / statistics.median(theirs_values)
    return 1 / times if FIGURES[figure].is_less_better else times


def table_of_medians(records: Sequence[Record]) -> str:
    """A row for each figure, a column for each server: the median, and in brackets the lowest and highest of the runs."""
    rows = []
    for path, figure in FIGURES.items():
        cells = [_median_and_range(values(record, path)) for record in records]
        if any(cells):
            rows.append([f"{figure.title}{', ' * bool(figure.unit)}{figure.unit}", *(cell or "–" for cell in cells)])
    return table(["", *(record["name"] for record in records)], rows)


def table_of_targets(records: Sequence[Record], targets: Iterable[dict[str, Any]]) -> str:
    """A row for each target: our median against that of the best of its opponents."""
    by_name = {record["name"]: record for record in records}
    rows = []
    for target in targets:
        path, ours = target["figure"], by_name.get(target["ours"])
        times = {name: ratio(path, ours, by_name[name]) for name in target["against"] if ours and name in by_name}
        measured = {name: value for name, value in times.items() if value is not None}
        row = [FIGURES[path].title, target["ours"], ", ".join(target["against"])]
        if ours and measured:
            best = min(measured, key=lambda name: measured[name])
            pair = [number(statistics.median(values(record, path))) for record in (ours, by_name[best])]
            is_met = "yes" if measured[best] >= target["at_least"] else "**no**"
            rows.append([*row, " : ".join(pair), f"{measured[best]:.2f} ×", f"{target['at_least']:g} ×", is_met])
        else:
            rows.append([*row, "not measured", "", f"{target['at_least']:g} ×", ""])
    return table(["figure", "of", "against the best of", "medians", "times better", "at least", "met"], rows)


def _median_and_range(found: list[float]) -> str:
    if len(found) < 2:
        return "".join(map(number, found))
    return f"{number(statistics.median(found))} ({number(min(found))}–{number(max(found))})"


def number(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def markdown(result: dict[str, Any], targets: Iterable[dict[str, Any]]) -> str:
    machine, records = result["where"], result["servers"]
    failed = [f"- {record['name']}: {record['error']}\n" for record in records if "error" in record]
    commands = [
        f"- {record['name']} ({record.get('version') or machine['commit']}): "
        f"`{' '.join([*(f'{k}={v}' for k, v in record['environment'].items()), record['command']])}`\n"
        for record in records
        if "command" in record
    ]
    return "\n".join(
        [
            "# Servers side by side\n",
            f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}; commit {machine['commit']}. Each server was "
            f"started in turn and probed {result['repeat']} times by `bench/probe.py`; medians, in brackets the lowest and the "
            "highest. *hardware* is what the machine could do at most, from rates measured in the same sitting.\n",
            "## Against the targets\n",
            table_of_targets(records, targets),
            *(["## Failed\n", "".join(failed)] if failed else []),
            "## Medians\n",
            table_of_medians([record for record in records if record["runs"]]),
            "## Commands\n",
            "".join(commands),
            "## Method\n",
            f"`{result['plan']}`; the probe's docstring says what each phase does.\n",
        ]
    )
