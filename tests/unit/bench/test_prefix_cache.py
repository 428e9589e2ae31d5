"""The product's prefix cache against caches that know nothing of it: one that forgets nothing, and an ideal LRU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.prefix_cache import BLOCK_SIZE, lru_hits, pool_hits

paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=40)
"""Prompts as ways down a tree of three branches, so that most of them share a begin."""


def prompt(path: tuple[int, ...]) -> list[int]:
    """A block of tokens for each step, and one token more: the last token of a prompt is always computed."""
    return [step for step in path for _ in range(BLOCK_SIZE)] + [9]


def ids(path: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Each stands for its block and all before it, as a trace's hash ids do."""
    return [path[: count + 1] for count in range(len(path))]


def ceiling(ways: list[tuple[int, ...]]) -> int:
    """Blocks that an earlier prompt had, too."""
    return sum(
        any(earlier[: count + 1] == way[: count + 1] for earlier in ways[:index])
        for index, way in enumerate(ways)
        for count in range(len(way))
    )


@given(paths, st.integers(1, 100))
def test_with_room_for_everything_the_ceiling_is_reached(ways: list[tuple[int, ...]], chunk_tokens: int) -> None:
    """Every block that an earlier prompt had is found, however prompts are cut into chunks; so does the LRU without a limit."""
    prompts = [[prompt(way)] for way in ways]
    expected = ceiling(ways)
    assert pool_hits(prompts, sum(len(way) + 1 for way in ways), chunk_tokens) == expected
    assert lru_hits(map(ids, ways), None) == expected


@given(paths, st.integers(7, 40))
def test_with_little_room_hits_are_those_of_an_ideal_lru(ways: list[tuple[int, ...]], num_blocks: int) -> None:
    """Of the pool's blocks one always holds the end of a prompt, which is no full block; the rest are an LRU cache."""
    assert pool_hits([[prompt(way)] for way in ways], num_blocks) == lru_hits(map(ids, ways), num_blocks - 1)


@given(paths, st.integers(48, 80))
def test_prompts_that_run_at_once_never_find_more_than_the_ceiling(ways: list[tuple[int, ...]], num_blocks: int) -> None:
    """They may miss what another one is just computing; what they hold is not evicted, so each is computed to its end."""
    assert pool_hits([[prompt(way) for way in ways]], num_blocks, chunk_tokens=24) <= ceiling(ways)


def test_a_last_block_that_is_not_full_is_not_found() -> None:
    """It is the only difference to the trace's own ceiling: at most a block of each prompt."""
    whole, cut = prompt((0, 1, 2)), prompt((0, 1, 2))[: 2 * BLOCK_SIZE + 5]
    assert pool_hits([[whole], [whole]], 16) == 3
    assert pool_hits([[cut], [cut]], 16) == 2


def test_a_prompt_larger_than_the_pool_is_an_error() -> None:
    """Rather than a program that waits for ever."""
    with pytest.raises(ValueError, match="2 blocks do not hold"):
        pool_hits([[prompt((0, 1))]], 2)
