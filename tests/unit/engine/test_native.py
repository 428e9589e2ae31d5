"""The compiled kernels against gguf's and torch's arithmetic, and their promise: the same bits whatever else is in the step."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from disagg.kernels import native
from disagg.kernels.native import TYPES, Crew, Decoder, Layer, Matrix
from disagg.kernels.paged import Work
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

BUILT = [name for name in native.variants() if native.library(name) is not None]
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")

pytestmark = pytest.mark.skipif(not BUILT, reason="the kernels were not built: needs a C++ compiler")


@pytest.fixture(scope="module", params=BUILT or ["none"])
def crew(request: pytest.FixtureRequest) -> Crew:
    lib = native.library(request.param)
    assert lib is not None
    return Crew(lib, 3)


def stored(kind: str, rows: int, cols: int, seed: int) -> tuple[np.ndarray[Any, Any], Tensor]:
    """Random weights as a file holds them, and their values."""
    rng = np.random.default_rng(seed)
    quantised = gguf.GGMLQuantizationType[kind]
    if kind in K_QUANTS:  # gguf cannot make these, so any bytes are taken, with scales of sensible size
        block, nbytes = gguf.GGML_QUANT_SIZES[quantised]
        data = rng.integers(0, 256, (rows, cols // block, nbytes), dtype=np.uint8)
        scales = rng.uniform(0.001, 0.01, (rows, cols // block, 2)).astype(np.float16).view(np.uint8)
        place = slice(nbytes - 2, nbytes) if kind == "Q6_K" else slice(0, 4)
        data[:, :, place] = scales[:, :, : place.stop - place.start]
        data = data.reshape(rows, -1)
    else:
        data = quantize(rng.standard_normal((rows, cols), dtype=np.float32), quantised)
    data = np.ascontiguousarray(data)
    return data, torch.from_numpy(np.array(dequantize(data, quantised), dtype=np.float32))


def matrix(crew: Crew, kind: str, data: np.ndarray[Any, Any], values: Tensor, order: Tensor | None = None) -> Matrix:
    return Matrix(crew, TYPES[kind], data.ctypes.data, (values.shape[0], values.shape[1]), order)


def group_of(kind: str) -> int:
    return 256 if kind in K_QUANTS else 1 if kind in ("F32", "F16", "BF16") else 32


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(TYPES)),
    rows=st.integers(1, 70),
    groups=st.integers(1, 5),
    tokens=st.integers(1, 140),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_the_values_in_the_file(
    crew: Crew, kind: str, rows: int, groups: int, tokens: int, seed: int
) -> None:
    """For every stored type, shape and number of tokens; and each token's row is the same bits alone as among the others."""
    data, values = stored(kind, rows, group_of(kind) * groups, seed)
    weights = matrix(crew, kind, data, values)
    x = torch.randn(tokens, values.shape[1], generator=torch.Generator().manual_seed(seed))
    found = weights.product(x)
    bound = 1e-5 * (x.abs().double() @ values.abs().double().T)  # of the terms, which may cancel
    assert bool(((found.double() - x.double() @ values.double().T).abs() <= bound + 1e-30).all())
    picked = seed % tokens
    assert torch.equal(weights.product(x[picked : picked + 1])[0], found[picked])
    assert torch.allclose(weights.row(rows - 1), values[-1], rtol=1e-6, atol=1e-6)


def in_bytes(x: Tensor) -> Tensor:
    """What the kernels make of activations: in each 32 of a row, multiples of the largest over 127."""
    parts = x.view(len(x), -1, 32)
    largest = parts.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # 127 / largest is torch's reciprocal times 127, rounded twice
    codes = torch.where(largest > 0, parts.double() * inverse.double(), 0).round()
    return (codes * (largest / 127).double()).view(x.shape)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(set(TYPES) - {"F32", "F16", "BF16"})),
    rows=st.integers(1, 70),
    groups=st.integers(1, 5),
    tokens=st.integers(1, 140),
    seed=st.integers(0, 99),
)
def test_products_of_bytes_are_those_of_the_rounded_activations(
    crew: Crew, kind: str, rows: int, groups: int, tokens: int, seed: int
) -> None:
    """No error but the rounding; a token's row is the same bits alone as among the others, and by every set of instructions."""
    data, values = stored(kind, rows, group_of(kind) * groups, seed)
    weights = matrix(crew, kind, data, values)
    x = torch.randn(tokens, values.shape[1], generator=torch.Generator().manual_seed(seed))
    x[0, :32] = 0
    found, rounded = weights.product(x, in_bytes=True), in_bytes(x)
    # Weights with a minimum are multiplied in two terms, which may cancel: their size counts, not that of the values.
    size = values.abs() if kind in ("Q8_0", "Q6_K") else 4 * values.abs().amax(1, keepdim=True).expand_as(values)
    bound = 1e-5 * (rounded.abs() @ size.double().T)
    assert bool(((found.double() - rounded @ values.double().T).abs() <= bound + 1e-30).all())
    picked = seed % tokens
    assert torch.equal(weights.product(x[picked : picked + 1], in_bytes=True)[0], found[picked])
    for name in BUILT:
        other = Crew(native.library(name) or crew.lib, 1)
        assert torch.equal(matrix(other, kind, data, values).product(x, in_bytes=True), found)


def test_what_is_no_number_does_not_become_one(crew: Crew) -> None:
    """A NaN or an infinity among a row's activations reaches every output of that row, and none of another."""
    data, values = stored("Q4_1", 20, 64, 4)
    x = torch.randn(3, 64)
    x[1, 40], x[2, 3] = float("nan"), float("inf")
    found = matrix(crew, "Q4_1", data, values).product(x, in_bytes=True)
    assert found[0].isfinite().all()
    assert found[1:].isnan().all()


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_what_a_product_can_do_besides(crew: Crew, tokens: int) -> None:
    """Biases, the sum with a residual, the gated product, rows in another order."""
    data, values = stored("Q4_1", 50, 96, 1)
    weights = matrix(crew, "Q4_1", data, values)
    other_data, other = stored("Q8_0", 50, 96, 2)  # as in files whose quantiser chose for each tensor by itself
    x, bias, residual = torch.randn(tokens, 96), torch.randn(50), torch.randn(tokens, 50)
    y = x @ values.T
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(weights.product(x, bias=bias), y + bias, **close)
    torch.testing.assert_close(weights.product(x, residual=residual), y + residual, **close)
    gated = weights.product(x, up=matrix(crew, "Q8_0", other_data, other))
    torch.testing.assert_close(gated, F.silu(y) * (x @ other.T), rtol=1e-4, atol=1e-3)
    order = torch.randperm(50).to(torch.int32)
    torch.testing.assert_close(matrix(crew, "Q4_1", data, values, order).product(x), y[:, order.long()], **close)


def test_packed_weights_are_no_larger_than_the_file(crew: Crew) -> None:
    """But for the minimum that Q4_0 leaves out, a stored type takes the file's bytes."""
    for kind in ("Q4_0", "Q4_1", "Q8_0", "F32", "BF16"):
        data, values = stored(kind, 64, 256, 3)
        assert matrix(crew, kind, data, values).nbytes <= data.nbytes * (20 / 18 if kind == "Q4_0" else 1)


def test_columns_that_are_no_whole_groups_are_refused(crew: Crew) -> None:
    """Half a group is no weights."""
    with pytest.raises(ValueError, match="cannot be packed"):
        Matrix(crew, TYPES["Q8_0"], 0, (16, 33))


class Small:
    """A decoder of random weights, with shapes that fit no vector."""

    num_layers, num_heads, num_kv_heads, hidden, inner, vocab = 2, 6, 2, 64, 96, 41

    def __init__(self, crew: Crew, *, in_bytes: bool = True, head_dim: int = 20) -> None:
        torch.manual_seed(7)
        self.head_dim = head_dim
        self._seed = 0
        self._crew = crew
        turned = self.num_heads + self.num_kv_heads
        layers = [
            Layer(
                attention_norm=torch.rand(self.hidden) + 0.5,
                mlp_norm=torch.rand(self.hidden) + 0.5,
                qk_norm=torch.rand(turned, self.head_dim) + 0.5,
                q=self._matrix(self.num_heads * self.head_dim, self.hidden),
                k=self._matrix(self.num_kv_heads * self.head_dim, self.hidden),
                v=self._matrix(self.num_kv_heads * self.head_dim, self.hidden),
                output=self._matrix(self.hidden, self.num_heads * self.head_dim, "F32"),
                gate=self._matrix(self.inner, self.hidden),
                up=self._matrix(self.inner, self.hidden),
                down=self._matrix(self.hidden, self.inner),
                q_bias=torch.randn(self.num_heads * self.head_dim),
                k_bias=torch.randn(self.num_kv_heads * self.head_dim),
                v_bias=None,
            )
            for _ in range(self.num_layers)
        ]
        embedding = self._matrix(self.vocab, self.hidden, "Q8_0")
        angles = torch.outer(torch.arange(1200.0), 0.3 ** torch.arange(self.head_dim / 2))
        self.decoder = Decoder(
            crew, layers, embedding=embedding, head=embedding, norm=torch.ones(self.hidden),
            turns=torch.polar(torch.ones_like(angles), angles), num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim, epsilon=1e-5, in_bytes=in_bytes,
        )  # fmt: skip

    def _matrix(self, rows: int, cols: int, kind: str = "Q4_1") -> Matrix:
        self._seed += 1
        data, values = stored(kind, rows, cols, self._seed)
        return matrix(self._crew, kind, data, values)

    def pool(self, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = (num_blocks, self.num_layers, 2, self.num_kv_heads, block_size, self.head_dim)
        return torch.full(shape, float("nan"), dtype=dtype)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_tokens_result_does_not_depend_on_how_it_was_computed(crew: Crew, data: st.DataObject) -> None:
    """Whole prompts, chunks, single tokens, alone or with others, in blocks of any size: the same bits, in a pool full of NaN.

    Likewise for an answer, in which there may be other bits than in a prompt.
    """
    small = Small(crew, in_bytes=data.draw(st.booleans()), head_dim=data.draw(st.sampled_from([20, 32])))
    num_tokens = data.draw(st.integers(1, 150) | st.integers(500, 1100))  # some over a segment of keys, or two
    block_size = data.draw(st.sampled_from([1, 7, 16, 64]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    is_prompt = data.draw(st.booleans())
    tokens = torch.randint(0, small.vocab, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens)).tolist()
    num_blocks = -(-num_tokens // block_size)
    expected = small.decoder.forward(
        [Work(range(num_blocks), 0, num_tokens, is_prompt)], tokens, small.pool(num_blocks, block_size, dtype)
    )
    assert expected.isfinite().all()

    pool = small.pool(2 * num_blocks, block_size, dtype)
    blocks = data.draw(st.permutations(range(2 * num_blocks)))
    mine, others = blocks[:num_blocks], blocks[num_blocks:]
    start, parts = 0, []
    while start < num_tokens:
        size = data.draw(st.integers(1, num_tokens - start))
        spans, line = [Work(mine, start, size, is_prompt)], tokens[start : start + size]
        if data.draw(st.booleans()):
            spans, line = [Work(others, 0, min(start + 1, 9)), *spans], tokens[: min(start + 1, 9)] + line
        parts.append(small.decoder.forward(spans, line, pool)[-size:])
        start += size
    found = torch.cat(parts)
    assert torch.equal(found, expected)
    assert torch.equal(small.decoder.logits(found[-1:])[0], small.decoder.logits(expected)[-1])


def test_the_number_of_threads_changes_nothing(crew: Crew) -> None:
    """One thread or more than there are cores, again and again: the same bits, and nobody waits for ever."""
    tokens = [5, 3, 8, 1, 9, 2, 6, 40, 0, 17] * 8
    results = []
    for num_threads in (1, 2, 5):
        small = Small(Crew(crew.lib, num_threads))
        results += [small.decoder.forward([Work(range(5), 0, 80)], tokens, small.pool(5, 16)) for _ in range(30)]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("head_dim", [20, 64])
def test_every_set_of_instructions_attends_alike(crew: Crew, head_dim: int) -> None:
    """Over a pool of float16, which some split into two numbers of 8 bits, as over one that is read as floats."""
    tokens = torch.randint(0, Small.vocab, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    other = native.library(BUILT[-1])
    assert other is not None
    results = []
    for threads in (crew, Crew(other, 1)):
        small = Small(threads, in_bytes=False, head_dim=head_dim)
        pool = small.pool(44, 16, torch.float16)
        results.append((small.decoder.forward([Work(range(44), 0, 700)], tokens, pool), pool))
    (found, found_kv), (expected, expected_kv) = results
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    torch.testing.assert_close(found_kv, expected_kv, rtol=2e-3, atol=2e-3, equal_nan=True)
