"""Plots of what a sitting of peers.py found."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from peers_report import FIGURES, Record, number, values

matplotlib.use("agg")
from matplotlib import pyplot

OURS, THEIRS = "tab:orange", "tab:gray"


def draw(result: dict[str, Any], base: Path) -> None:
    """``base``-decode.png, -prefill.png and -interference.png, as far as these were measured."""
    records = [record for record in result["servers"] if record["runs"] and "command" in record]
    machine = result["where"]
    footnote = f"{machine['cpu']}, {machine['cores']} cores, commit {machine['commit']}; median of {result['repeat']}"
    for name, paths in {
        "decode": [f"decode.{n}.tokens_per_s" for n in result["plan"]["streams"]],
        "prefill": [f"prefill.{n}.tokens_per_s" for n in result["plan"]["prompts"]],
    }.items():
        if paths := [path for path in paths if any(values(record, path) for record in records)]:
            bars(records, paths, footnote, base.with_name(f"{base.name}-{name}.png"))
    if any(values(record, "interference.itl_p50_ms") for record in records):
        ranges(records, footnote, base.with_name(f"{base.name}-interference.png"))


def bars(records: Sequence[Record], paths: Sequence[str], footnote: str, target: Path) -> None:
    """A panel for each figure, a bar for each server with the range of its runs."""
    figure, panels = pyplot.subplots(
        1, len(paths), sharey=True, squeeze=False, figsize=(4 * len(paths) + 2, 0.4 * len(records) + 1.5)
    )
    for panel, path in zip(panels[0], paths):
        measured = [record for record in records if values(record, path)]
        medians = [statistics.median(values(record, path)) for record in measured]
        spread = [
            [median - min(values(record, path)) for record, median in zip(measured, medians)],
            [max(values(record, path)) - median for record, median in zip(measured, medians)],
        ]
        names = [record["name"] for record in measured]
        drawn = panel.barh(names, medians, xerr=spread, color=[_colour(record) for record in measured], ecolor="black", capsize=2)
        panel.bar_label(drawn, [number(median) for median in medians], label_type="center")
        panel.set_title(FIGURES[path].title)
        panel.set_xlabel(FIGURES[path].unit)
    panels[0][0].invert_yaxis()
    _save(figure, footnote, target)


def ranges(records: Sequence[Record], footnote: str, target: Path) -> None:
    """How the gaps between tokens are spread while long prompts are prefilled: a line for each server, on a logarithmic axis."""
    measured = [record for record in records if values(record, "interference.itl_p50_ms")]
    figure, panel = pyplot.subplots(figsize=(10, 0.45 * len(measured) + 1.8))
    for row, record in enumerate(measured):
        quantiles = {
            q: statistics.median(run["interference"]["itl_quantiles_ms"][q] for run in record["runs"])
            for q in record["runs"][0]["interference"]["itl_quantiles_ms"]
        }
        colour = _colour(record)
        panel.plot([quantiles["0.01"], quantiles["1"]], [row, row], color=colour, linewidth=1)
        panel.plot([quantiles["0.25"], quantiles["0.75"]], [row, row], color=colour, linewidth=7, solid_capstyle="butt")
        for q, marker in {"0.5": "o", "0.99": "|", "1": "x"}.items():
            panel.plot(quantiles[q], row, marker, color="black", markersize=9 if marker == "|" else 6)
    panel.set_yticks(range(len(measured)), [record["name"] for record in measured])
    panel.invert_yaxis()
    panel.set_xscale("log")
    panel.set_xlabel(
        "ms between tokens of a stream beside long prompts: p1 to longest; bar: middle half, ● p50, | p99, × longest"
    )
    panel.grid(axis="x", which="both", alpha=0.3)
    _save(figure, footnote, target)


def _colour(record: Record) -> str:
    return OURS if record["is_ours"] else THEIRS


def _save(figure: Any, footnote: str, target: Path) -> None:
    figure.text(0.01, 0.01, footnote, fontsize=8, color="gray")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
