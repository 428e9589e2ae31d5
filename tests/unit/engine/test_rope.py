"""Rotary embedding: the turning itself, and the frequencies of each kind of scaling against transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from disagg.kernels.rope import rope_, rope_table
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from disagg.engine.llama import rope_frequencies
from disagg.model import DividedScaling, LinearScaling, Llama3Scaling, ModelSpec, RopeScaling, YarnScaling

FREQUENCIES = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)


def spec_with(scaling: RopeScaling | None) -> ModelSpec:
    return ModelSpec(
        architecture="llama",
        num_layers=1,
        hidden_size=256,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=100,
        max_position=4096,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=scaling,
    )


def reference(parameters: dict[str, object]) -> tuple[torch.Tensor, float]:
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 10000.0, **parameters},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](config, torch.device("cpu"))
    return frequencies, factor


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            Llama3Scaling(8.0, 1.0, 4.0, 1024),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        ),
        (YarnScaling(4.0, 1024), {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}),
        (
            YarnScaling(4.0, 1024, attention_factor=1.5, beta_fast=20.0, beta_slow=2.0, truncate=False),
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "attention_factor": 1.5,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
                "truncate": False,
            },
        ),
    ],
)
def test_scaled_frequencies_equal_transformers(scaling: RopeScaling, parameters: dict[str, object]) -> None:
    """Frequencies and the factor on cos and sin are transformers' for every kind of scaling."""
    found, factor = rope_frequencies(spec_with(scaling))
    expected, expected_factor = reference(parameters)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor)
    assert not torch.equal(found, rope_frequencies(spec_with(None))[0])


def test_divided_frequencies() -> None:
    """GGUF's table of divisors divides each frequency by its own."""
    divisors = tuple(float(i + 1) for i in range(32))
    found, factor = rope_frequencies(spec_with(DividedScaling(divisors)))
    plain, _ = rope_frequencies(spec_with(None))
    torch.testing.assert_close(found * torch.tensor(divisors), plain)
    assert factor == 1.0


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_scores_depend_on_distance_only(first: int, second: int, shift: int) -> None:
    """q·k after turning depends only on how far apart the positions are: what the embedding is for."""
    table = rope_table(FREQUENCIES.double().float(), 1001)
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(7)).unbind(0)

    def score(q_position: int, k_position: int) -> float:
        turned_q, turned_k = q.clone(), k.clone()
        rope_(turned_q, table[[q_position]])
        rope_(turned_k, table[[k_position]])
        return float((turned_q * turned_k).sum())

    assert score(first, second) == pytest.approx(score(first + shift, second + shift), abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_turns_each_pair_in_place(dtype: torch.dtype) -> None:
    """Pair i of position p is turned by p * frequency[i], also in a strided slice, and nothing outside the slice changes."""
    full = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = full.clone()
    positions = torch.tensor([0, 5, 9])
    rope_(full[:, :2], rope_table(FREQUENCIES, 10)[positions])
    angles = positions[:, None, None] * FREQUENCIES
    x, y = before[:, :2].float()[..., 0::2], before[:, :2].float()[..., 1::2]
    expected = torch.stack((x * angles.cos() - y * angles.sin(), x * angles.sin() + y * angles.cos()), -1).flatten(-2)
    torch.testing.assert_close(
        full[:, :2].float(),
        expected,
        rtol=1e-2 if dtype is torch.bfloat16 else 1e-5,
        atol=1e-2 if dtype is torch.bfloat16 else 1e-5,
    )
    assert torch.equal(full[:, 2:], before[:, 2:])
