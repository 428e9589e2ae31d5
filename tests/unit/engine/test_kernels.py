"""Kernels against straightforward dense references, over random shapes, lengths, block tables and poisoned pools."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from disagg.kernels import linear, paged
from disagg.kernels.paged import Work, attention, make_plan, plan_order, write_kv
from disagg.kernels.rope import rms_norm
from hypothesis import given
from hypothesis import strategies as st


@dataclass
class Problem:
    """A pool with some sequences' history in it, and the queries, keys and values of their next tokens."""

    works: list[Work]
    pool: torch.Tensor
    layer: int
    q: torch.Tensor  # [tokens, heads, head_dim]
    kv: torch.Tensor  # [tokens, 2 * kv_heads, head_dim]
    expected: torch.Tensor  # [tokens, heads, head_dim]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([4, 8, 16]))
    block_size = draw(st.sampled_from([1, 3, 16]))
    num_layers = draw(st.integers(1, 3))
    parts = draw(st.lists(st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 140))), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    counts = [-(-(start + size) // block_size) + draw(st.integers(0, 1)) for start, size in parts]
    table = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    pool = torch.full((sum(counts) + 2, num_layers, 2, num_kv_heads, block_size, head_dim), math.nan)
    layer = draw(st.integers(0, num_layers - 1))
    works = []
    for (start, size), count in zip(parts, counts):
        works.append(Work([table.pop() for _ in range(count)], start, size))
    works = [works[index] for index in plan_order(works)]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    queries, new, expected = [], [], []
    for work in works:
        length = work.start + work.num_tokens
        kv = normal(length, 2 * num_kv_heads, head_dim)
        for position in range(work.start):
            slots = pool[work.blocks[position // block_size], layer].view(2 * num_kv_heads, block_size, head_dim)
            slots[:, position % block_size] = kv[position]
        q = normal(work.num_tokens, num_kv_heads * group, head_dim)
        queries.append(q)
        new.append(kv[work.start :])
        expected.append(dense_attention(q, kv[:, :num_kv_heads], kv[:, num_kv_heads:], work.start))
    return Problem(works, pool, layer, torch.cat(queries), torch.cat(new), torch.cat(expected))


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """Textbook causal attention in float64: [tokens, heads, head_dim] over [length, kv_heads, head_dim]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("thd,lhd->htl", q.double(), k) / math.sqrt(q.shape[-1])
    allowed = torch.ones(scores.shape[1:], dtype=torch.bool).tril(start)
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v).float()


@given(problems())
def test_paged_attention_equals_dense_attention(problem: Problem) -> None:
    """Any mix of chunks and single tokens, from scattered blocks with NaN in every slot not written, gives the dense result."""
    plan = make_plan(problem.works, problem.pool, problem.q.shape[1])
    write_kv(problem.pool, problem.layer, problem.kv, plan)
    found = attention(problem.q, problem.pool, problem.layer, plan)
    torch.testing.assert_close(found, problem.expected, rtol=1e-4, atol=1e-5)


@given(problems())
def test_write_touches_its_own_slots_only(problem: Problem) -> None:
    """Writing a step's KV fills exactly that many slots of one layer, and changes nothing else."""
    before = problem.pool.clone()
    plan = make_plan(problem.works, problem.pool, problem.q.shape[1])
    write_kv(problem.pool, problem.layer, problem.kv, plan)
    changed = before.view(torch.int32) != problem.pool.view(torch.int32)
    assert int(changed.sum()) == problem.kv.numel()
    assert int(changed[:, problem.layer].sum()) == problem.kv.numel()


@given(problems(), st.integers(1, 64))
def test_decode_groups_do_not_change_results(problem: Problem, group_tokens: int) -> None:
    """However the decoding sequences are grouped, each gets the same attention."""
    limit = paged.GROUP_TOKENS
    paged.GROUP_TOKENS = group_tokens
    try:
        plan = make_plan(problem.works, problem.pool, problem.q.shape[1])
    finally:
        paged.GROUP_TOKENS = limit
    write_kv(problem.pool, problem.layer, problem.kv, plan)
    found = attention(problem.q, problem.pool, problem.layer, plan)
    torch.testing.assert_close(found, problem.expected, rtol=1e-4, atol=1e-5)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), min_size=1, max_size=20))
def test_plan_order_is_a_permutation(parts: list[tuple[int, int]]) -> None:
    """Chunks first, then single tokens from short to long, each exactly once."""
    works = [Work([0], start, size) for start, size in parts]
    order = plan_order(works)
    assert sorted(order) == list(range(len(works)))
    singles = [works[index].start for index in order if works[index].num_tokens == 1]
    assert singles == sorted(singles)
    assert all(works[index].num_tokens == 1 for index in order[len(order) - len(singles) :])


@pytest.mark.parametrize("kind", [linear.PlainLinear, linear.PackedLinear])
@pytest.mark.parametrize("rows", [1, 2, 17, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_the_formula(kind: type[linear.PlainLinear | linear.PackedLinear], rows: int, has_bias: bool) -> None:
    """Plain and packed products, with and without bias and residual, equal the float64 formula."""
    torch.manual_seed(0)
    weight, bias = torch.randn(40, 24), torch.randn(40) if has_bias else None
    x, residual = torch.randn(rows, 24), torch.randn(rows, 40)
    expected = (x.double() @ weight.double().T + (0 if bias is None else bias.double())).float()
    layer = kind(weight.clone(), bias)
    kept = residual.clone()
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.add_to(residual, x), kept + expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_takes_either_layout(dtype: torch.dtype) -> None:
    """``w`` may be contiguous or the transpose of something contiguous."""
    torch.manual_seed(0)
    x, w = torch.randn(33, 16).to(dtype), torch.randn(50, 16).to(dtype)
    expected = x.double() @ w.double().T
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    for form in (w, w.T.contiguous().T):
        torch.testing.assert_close(linear.product(x, form).double(), expected, rtol=tolerance, atol=tolerance)


def test_linear_packs_only_what_onednn_takes() -> None:
    """float32 on the CPU is packed; bfloat16 goes the plain way."""
    assert isinstance(linear.linear(torch.ones(4, 4)), linear.PackedLinear)
    assert isinstance(linear.linear(torch.ones(4, 4, dtype=torch.bfloat16)), linear.PlainLinear)


@given(st.integers(1, 5), st.integers(1, 70), st.floats(1e-6, 1e-2))
def test_rms_norm_equals_the_formula(rows: int, size: int, eps: float) -> None:
    """x / sqrt(mean(x²) + eps) * weight."""
    generator = torch.Generator().manual_seed(rows * size)
    x, weight = torch.randn(rows, size, generator=generator), torch.randn(size, generator=generator)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, eps).double(), expected, rtol=1e-4, atol=1e-5)
