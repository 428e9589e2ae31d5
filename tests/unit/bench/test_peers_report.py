"""The tables of a sitting: which way is better, who the best opponent is, and what was not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import peers_plots, peers_report
from bench.peers_report import ratio, table_of_medians, table_of_targets


def record(name: str, *rates: float, ready_s: float = 5.0) -> dict[str, Any]:
    """A server of which decode's rate was found to be each of ``rates``."""
    quantiles = {f"{q:g}": 10.0 * q for q in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)}
    interference = {"itl_p50_ms": 20.0, "itl_p99_ms": 2000.0 / rates[0], "itl_quantiles_ms": quantiles}
    runs = [{"decode": {"16": {"tokens_per_s": rate}}, "interference": interference} for rate in rates]
    return {
        "name": name,
        "command": f"$BIN/{name}",
        "environment": {},
        "is_ours": name == "ours",
        "ready_s": ready_s,
        "runs": runs,
    }


def target(figure: str, against: list[str], at_least: float) -> dict[str, Any]:
    return {"figure": figure, "ours": "ours", "against": against, "at_least": at_least}


def test_times_better_of_medians() -> None:
    """More is better of a rate, less of a time; the median of the runs counts, not an odd one."""
    ours, theirs = record("ours", 300, 9, 310, ready_s=5), record("theirs", 100, ready_s=50)
    assert ratio("decode.16.tokens_per_s", ours, theirs) == 3
    assert ratio("ready_s", ours, theirs) == 10


def test_the_best_opponent_decides() -> None:
    """A target against two servers is met only when both are beaten by as much."""
    servers = [record("ours", 300), record("weak", 100), record("strong", 250)]
    (row,) = table_of_targets(servers, [target("decode.16.tokens_per_s", ["weak", "strong"], 1.4)]).splitlines()[2:]
    assert "300 : 250 | 1.20 × | 1.4 × | **no**" in row
    (row,) = table_of_targets(servers, [target("decode.16.tokens_per_s", ["weak"], 1.4)]).splitlines()[2:]
    assert "300 : 100 | 3.00 × | 1.4 × | yes" in row


@pytest.mark.parametrize("missing", [{"name": "theirs", "runs": [], "error": "it ended"}, {"name": "another", "runs": []}])
def test_a_target_without_an_opponent_is_not_met(missing: dict[str, Any]) -> None:
    """An opponent that failed or was not started is told as such."""
    (row,) = table_of_targets([record("ours", 300), missing], [target("decode.16.tokens_per_s", ["theirs"], 1)]).splitlines()[2:]
    assert "not measured" in row
    assert "yes" not in row


def test_the_range_of_the_runs_stands_beside_their_median() -> None:
    """So that a reader sees how much a figure is worth; what was not measured is a dash."""
    rows = table_of_medians([record("ours", 300, 290, 320), {"name": "hardware", "runs": []}]).splitlines()
    assert "| decode, 16 streams, tokens/s | 300 (290–320) | – |" in rows


def test_the_whole_report_and_its_plots(tmp_path: Path) -> None:
    """Commands stand in it with their placeholders, failures with their reasons, and every plot is written."""
    broken = {**record("broken", 1), "runs": [], "error": "RuntimeError: it was not ready in time"}
    result = {
        "where": {"cpu": "some", "cores": 2, "kernel": "6", "commit": "abc"},
        "repeat": 2,
        "plan": {"streams": [1, 16], "prompts": [512]},
        "servers": [{"name": "hardware", "runs": []}, record("ours", 300, 290), broken],
    }
    text = peers_report.markdown(result, [])
    assert "`$BIN/ours`" in text
    assert "broken: RuntimeError: it was not ready in time" in text
    peers_plots.draw(result, tmp_path / "peers")
    assert {path.name for path in tmp_path.iterdir()} == {f"peers-{name}.png" for name in ("decode", "interference")}
