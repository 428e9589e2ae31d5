"""What a replay computes without a server: traces read and scaled, prompts made, goodput counted."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.goodput import Limits, Outcome, summarise
from bench.traces import Arrival, fitted, prompt_tokens, read_azure, read_mooncake, read_trace, scaled

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.9799600,4808,10
"""
TOKEN_IDS = range(1000, 32000)
arrivals = st.builds(Arrival, at_s=st.floats(0, 3600), num_prompt=st.integers(1, 100_000), num_output=st.integers(1, 2000))


def test_an_azure_trace_begins_at_zero_in_order_of_time(tmp_path: Path) -> None:
    """Seven digits of a second are read; the first request is at 0, and the attribution comes along."""
    (tmp_path / "code.csv").write_text(AZURE)
    trace = read_trace(tmp_path / "code.csv")
    assert [(a.num_prompt, a.num_output, a.hash_ids) for a in trace.arrivals] == [(4808, 10, ()), (3180, 8, ())]
    assert [a.at_s for a in trace.arrivals] == [0.0, pytest.approx(0.052, abs=1e-5)]
    assert (trace.name, "CC-BY 4.0" in trace.attribution, "Splitwise" in trace.attribution) == ("code", True, True)


def test_a_mooncake_trace_keeps_its_hash_ids(tmp_path: Path) -> None:
    """Milliseconds become seconds."""
    line = json.dumps({"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]})
    assert list(read_mooncake([line])) == [Arrival(1.5, 600, 3, (0, 7))]
    (tmp_path / "m.jsonl").write_text(line)
    assert "Apache-2.0" in read_trace(tmp_path / "m.jsonl").attribution


@pytest.mark.parametrize(
    ("read", "lines"),
    [
        (read_azure, ["TIMESTAMP,ContextTokens", "2023-11-16 18:17:03.97,4808"]),
        (read_azure, ["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,2"]),
        (read_mooncake, ["", "{}"]),
        (read_mooncake, ['{"timestamp": 0, "input_length": 1, "output_length": 1}']),
    ],
)
def test_a_line_that_is_not_right_is_named(read, lines: list[str]) -> None:
    """ValueError with the number of the line."""
    with pytest.raises(ValueError, match=r"line [12]: "):
        list(read(lines))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """The suffix tells the format; there must be a request."""
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"\.csv or \.jsonl"):
        read_trace(tmp_path / "trace.parquet")
    with pytest.raises(ValueError, match="no requests"):
        read_trace(tmp_path / "empty.jsonl")


@given(st.lists(arrivals), st.floats(0.01, 10), st.floats(0.01, 2), st.floats(1, 1000), st.floats(0, 1000))
def test_scaling_keeps_the_order_and_stays_within_the_time(
    before: list[Arrival], rate: float, length: float, duration_s: float, begin_s: float
) -> None:
    """Rate stretches time and nothing else; lengths scale to within half a token, never below one."""
    after = scaled(before, rate=rate, length=length, duration_s=duration_s, begin_s=begin_s)
    kept = [arrival for arrival in before if 0 <= (arrival.at_s - begin_s) / rate < duration_s]
    assert [a.at_s * rate + begin_s for a in after] == pytest.approx([a.at_s for a in kept])
    for one, other in zip(kept, after, strict=True):
        assert other.num_prompt == max(1, round(one.num_prompt * length))
        assert other.num_output == max(1, round(one.num_output * length))


@given(arrivals, st.integers(2, 100_000))
def test_what_is_too_long_is_cut_to_the_context(arrival: Arrival, max_context: int) -> None:
    """Prompt and answer fit together, neither vanishes, and what fitted before is as it was."""
    cut = fitted(arrival, max_context)
    assert cut.num_prompt >= 1
    assert cut.num_output >= 1
    assert cut.num_prompt + cut.num_output <= max_context
    if arrival.num_output <= max_context // 2 and arrival.num_prompt + arrival.num_output <= max_context:
        assert cut == arrival


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6), st.floats(0.01, 1), st.data())
def test_prompts_are_equal_exactly_as_far_as_their_hash_ids_are(
    path: list[int], other_path: list[int], length: float, data: st.DataObject
) -> None:
    """An id stands for its place and all before it, as in the traces: common ids give common tokens, up to where they end."""
    pair = []
    for steps in (path, other_path):
        ids = tuple(hash(tuple(steps[: count + 1])) for count in range(len(steps)))
        num_prompt = data.draw(st.integers(max(0, len(ids) - 1) * 512 + 1, max(1, len(ids)) * 512))
        arrival = Arrival(0.0, num_prompt, 1, ids)
        pair += scaled([arrival], rate=1, length=length, duration_s=1)
    prompts = [prompt_tokens(arrival, TOKEN_IDS, 0, random.Random(index)) for index, arrival in enumerate(pair)]
    assert [len(prompt) for prompt in prompts] == [arrival.num_prompt for arrival in pair]
    num_common = sum(1 for _ in itertools.takewhile(lambda ids: ids[0] == ids[1], zip(path, other_path)))
    end = min(round(num_common * 512 * length), *(len(prompt) for prompt in prompts))
    assert prompts[0][:end] == prompts[1][:end]
    assert prompts[0][end : end + 8] != prompts[1][end : end + 8] or end == max(len(prompt) for prompt in prompts)


def test_another_seed_gives_other_prompts() -> None:
    """So that a second run on the same server finds nothing of the first one in its prefix cache."""
    arrival = Arrival(0.0, 512, 1, (5,))
    one, same, other = (prompt_tokens(arrival, TOKEN_IDS, seed, random.Random(0)) for seed in (1, 1, 2))
    assert one == same != other


@given(st.lists(st.tuples(st.floats(0, 4), st.floats(0, 4), st.integers(1, 50), st.booleans()), min_size=1))
def test_goodput_counts_what_is_within_both_limits(raw: list[tuple[float, float, int, bool]]) -> None:
    """A failed request is never good; one token has no TPOT; widening a limit never lowers the goodput."""
    outcomes = [Outcome(8, 0.0, ttft, ttft + decode, num, error="broken" if fails else None) for ttft, decode, num, fails in raw]
    expected = sum(
        not fails and ttft <= 2 and (num == 1 or (ttft + decode - ttft) / (num - 1) <= 0.1) for ttft, decode, num, fails in raw
    )
    summary = summarise(outcomes, Limits(2.0, 0.1), 10.0)
    assert summary["goodput"] == pytest.approx(expected / len(raw), abs=1e-4)
    assert summary["goodput_per_s"] == pytest.approx(expected / 10, abs=1e-3)
    assert summary["errors"] == sum(fails for *_, fails in raw)
    assert summarise(outcomes, Limits(4.0, 0.1), 10.0)["goodput"] >= summary["goodput"]
    assert max(summary["within_ttft"], summary["within_tpot"]) >= summary["goodput"]


def test_cached_tokens_are_told_only_where_the_server_tells_them() -> None:
    """None is not 0: a server without the figure may have cached everything."""
    limits = Limits(2.0, 0.1)
    assert summarise([Outcome(8, 0.0, 1.0, 2.0, 5)], limits, 1.0)["cached_prompt_tokens"] is None
    told = [Outcome(8, 0.0, 1.0, 2.0, 5, num_cached=cached) for cached in (0, 4)]
    assert summarise(told, limits, 1.0)["cached_prompt_tokens"] == 4
