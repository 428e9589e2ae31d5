"""Sampling: the filters' meaning, the distribution of draws, and that nothing but (seed, position) decides a draw."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.sampling import Row, sample, score, uniform
from disagg.request import SamplingParams

SIZE = 40
LOGITS = torch.randn(SIZE, generator=torch.Generator().manual_seed(3)) * 2


def row(tokens: tuple[int, ...] = (1, 2, 3), num_prompt: int = 3, **params: Any) -> Row:
    return Row(SamplingParams(**{"max_tokens": 100, **params}), tokens, num_prompt)


def draws(count: int, logits: torch.Tensor = LOGITS, **params: Any) -> np.ndarray:
    """How often each token is drawn over ``count`` seeds."""
    rows = [row(seed=seed, **params) for seed in range(count)]
    tokens = [token for token, _ in sample(logits.expand(count, -1), rows)]
    return np.bincount(tokens, minlength=len(logits))


def allowed(logits: torch.Tensor = LOGITS, **params: Any) -> set[int]:
    return set(np.flatnonzero(draws(2000, logits, **params)).tolist())


def test_greedy_takes_the_best() -> None:
    """Temperature 0, or one too small to divide by, is the arg max; with other rows in the batch drawn."""
    rows = [row(temperature=0.0), row(temperature=1.0, seed=1), row(temperature=1e-30)]
    tokens = [token for token, _ in sample(torch.stack([LOGITS, LOGITS, -LOGITS]), rows)]
    assert tokens[0] == int(LOGITS.argmax())
    assert tokens[2] == int(LOGITS.argmin())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """Over many seeds, tokens come as often as softmax(logits / temperature) says (chi-squared, far from its tail)."""
    count = 4000
    expected = torch.softmax(LOGITS.double() / temperature, -1).numpy() * count
    found = draws(count, temperature=temperature)
    often = expected > 5
    chi_squared = ((found - expected)[often] ** 2 / expected[often]).sum()
    assert chi_squared < often.sum() + 5 * math.sqrt(2 * often.sum())


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 7), st.integers(1, 8))
def test_a_draw_depends_on_seed_and_position_only(seed: int, position: int, place: int, size: int) -> None:
    """The same row draws the same token alone and anywhere in any batch."""
    tokens = tuple(range(position))
    place %= size
    rows = [row(seed=index, temperature=0.3 + index, top_k=index) for index in range(size)]
    rows[place] = row(tokens, 0, seed=seed, temperature=1.3, top_p=0.95)
    logits = torch.randn(size, SIZE, generator=torch.Generator().manual_seed(size))
    logits[place] = LOGITS
    alone = sample(LOGITS[None], [rows[place]])
    assert sample(logits, rows)[place] == alone[0]


def test_uniform_is_spread_and_fixed() -> None:
    """One number for each (seed, position), never 1, evenly spread along both; the values are frozen: replays rely on them."""
    by_position = np.array([uniform(1, position) for position in range(2000)])
    by_seed = np.array([uniform(seed, 1) for seed in range(2000)])
    for numbers in (by_position, by_seed):
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        assert np.abs(np.histogram(numbers, 10, (0, 1))[0] - 200).max() < 70
        assert len(set(numbers.tolist())) == 2000
    assert uniform(0, 0) == np.random.Generator(np.random.Philox(key=0, counter=0)).random()
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


def test_top_k_keeps_the_k_best() -> None:
    """Only the k best tokens can be drawn; 0 and k beyond the vocabulary switch it off."""
    assert allowed(top_k=3, temperature=3.0) == set(LOGITS.topk(3).indices.tolist())
    np.testing.assert_array_equal(draws(300, top_k=0), draws(300, top_k=1000))


@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.9])
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float) -> None:
    """The fewest best tokens whose probabilities reach p."""
    probabilities, order = torch.softmax(LOGITS.double(), -1).sort(descending=True)
    count = int((probabilities.cumsum(0) < top_p).sum()) + 1
    found = allowed(top_p=top_p)
    assert found <= set(order[:count].tolist())
    assert set(order[: min(count, 8)].tolist()) <= found


def test_top_p_counts_what_top_k_leaves() -> None:
    """top_p's shares are of the distribution after top_k."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert allowed(logits, top_p=0.5) == {0, 1}
    assert allowed(logits, top_k=2, top_p=0.5) == {0}  # 0.4 / 0.7 is already more than half


def test_top_p_of_a_flat_large_vocabulary() -> None:
    """A nucleus larger than the first guess is found too."""
    logits = torch.zeros(5000)
    logits[:2500] = 1.0
    found = allowed(logits, top_p=0.5)
    assert max(found) < 2500
    assert len(found) > 1200


def test_min_p_is_relative_to_the_best() -> None:
    """Tokens less likely than min_p times the best are out."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert allowed(logits, min_p=0.25) == {0, 1, 2}
    assert allowed(logits, min_p=1.0) == {0}


def test_filters_that_remove_nothing_change_nothing() -> None:
    """The draw of a filtered distribution that equals the unfiltered one is the same token."""
    plain = draws(300)
    np.testing.assert_array_equal(draws(300, top_k=SIZE, top_p=0.9999999999, min_p=1e-30), plain)


def test_repetition_penalty_looks_at_prompt_and_output() -> None:
    """Positive logits of seen tokens are divided, negative ones multiplied, once however often the token occurred."""
    logits = torch.tensor([[2.0, -1.0, 1.9, -1.0, 1.5]])
    seen = {"tokens": (0, 0, 2), "num_prompt": 2, "temperature": 0.0}
    assert sample(logits, [row(**seen)])[0][0] == 0
    assert sample(logits, [row(**seen, repetition_penalty=1.4)])[0][0] == 4
    negative = torch.tensor([[-1.0, -1.5]])
    assert sample(negative, [row((0,), 1, temperature=0.0, repetition_penalty=2.0)])[0][0] == 1


def test_presence_and_frequency_look_at_output_only() -> None:
    """Presence counts once, frequency each time, and the prompt never."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])

    def best(tokens: tuple[int, ...], num_prompt: int, **params: float) -> int:
        return sample(logits, [row(tokens, num_prompt, temperature=0.0, **params)])[0][0]

    assert best((0, 0, 0), 3, presence_penalty=2.0, frequency_penalty=2.0) == 0
    assert best((1, 0), 1, presence_penalty=0.9) == 0
    assert best((1, 0), 1, presence_penalty=1.1) == 1
    assert best((1, 0), 1, frequency_penalty=0.6) == 0
    assert best((1, 0, 0), 1, frequency_penalty=0.6) == 1


def test_logit_bias_is_added() -> None:
    """A bias of ±100 forces or forbids a token."""
    worst, top = int(LOGITS.argmin()), int(LOGITS.argmax())
    assert sample(LOGITS[None], [row(temperature=0.0, logit_bias={worst: 100.0})])[0][0] == worst
    assert allowed(logit_bias={top: -100.0}).isdisjoint({top})


def test_min_tokens_bans_stop_ids_until_reached() -> None:
    """Stop ids cannot come before min_tokens were generated, and can afterwards; ids outside the vocabulary are ignored."""
    top = int(LOGITS.argmax())
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (top, 10**6)}
    assert sample(LOGITS[None], [row((5, 6), 1, **params)])[0][0] != top
    assert sample(LOGITS[None], [row((5, 6, 7), 1, **params)])[0][0] == top


def test_adjusting_leaves_the_callers_logits() -> None:
    """Penalties work on a copy: log-probabilities are of the raw distribution."""
    logits = LOGITS[None].clone()
    token, logprobs = sample(logits, [row(temperature=0.0, logit_bias={5: 100.0}, num_logprobs=2)])[0]
    assert token == 5
    assert logprobs is not None
    raw = torch.log_softmax(LOGITS, -1)
    assert logprobs.logprob == pytest.approx(float(raw[5]))
    assert logprobs.top == [(int(i), pytest.approx(float(raw[i]))) for i in raw.topk(2).indices]
    assert torch.equal(logits, LOGITS[None])


def test_logprobs_only_where_asked() -> None:
    """None where not asked for; no alternatives for 0; k best for k, each row by its own number."""
    rows = [row(temperature=0.0), row(temperature=0.0, num_logprobs=0), row(temperature=0.0, num_logprobs=4)]
    results = [logprobs for _, logprobs in sample(LOGITS.expand(3, -1), rows)]
    assert results[0] is None
    assert [len(entry.top) for entry in results[1:] if entry is not None] == [0, 4]


def test_score_is_log_softmax() -> None:
    """Scores are those of the tokens given, not of the best."""
    entries = score(LOGITS.expand(2, -1), [7, 9], [0, 0])
    expected = torch.log_softmax(LOGITS, -1)
    assert [entry.logprob for entry in entries] == pytest.approx([float(expected[7]), float(expected[9])])


@given(
    st.floats(0.0, 2.0),
    st.integers(0, 50),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 2**63),
    st.floats(0.01, 1e4),
)
def test_any_parameters_give_a_token_of_the_vocabulary(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int, scale: float
) -> None:
    """Extreme but valid settings never fall out of the vocabulary and never pick a masked token."""
    logits = LOGITS[None] * scale
    logits[0, 5] = -math.inf
    token, _ = sample(logits, [row(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)])[0]
    assert 0 <= token < SIZE
    assert token != 5
