"""KV layout and block identity."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.kv import KVLayout, block_hashes

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, block_size=16, head_dim=8, dtype="float32", model="m")


def test_sizes() -> None:
    """A block holds two planes of all layers and heads; a started block counts whole."""
    assert LAYOUT.block_nbytes == 2 * 2 * 3 * 16 * 8 * 4
    assert LAYOUT.shape(5) == (5, 2, 2, 3, 16, 8)
    assert [LAYOUT.num_blocks(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "block_size", "head_dim", "dtype", "model", "order"])
def test_any_difference_changes_the_fingerprint_and_is_named(field: str) -> None:
    """Peers that differ in anything see it in the fingerprint, and the sentence names the field with both values."""
    value = getattr(LAYOUT, field)
    other = msgspec.structs.replace(LAYOUT, **{field: value + 1 if isinstance(value, int) else "bfloat16"})
    assert other.fingerprint() != LAYOUT.fingerprint()
    difference = LAYOUT.difference(other)
    assert difference is not None
    assert field in difference
    assert repr(value) in difference
    assert LAYOUT.difference(LAYOUT) is None


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 7), st.data())
def test_equal_digest_means_equal_prefix(tokens: list[int], block_size: int, data: st.DataObject) -> None:
    """Digests are chained: one changed token changes its block's digest and all after it, none before."""
    hashes = block_hashes(tokens, block_size)
    assert len(hashes) == len(tokens) // block_size
    assert block_hashes(tokens, block_size, hashes[: len(hashes) // 2]) == hashes
    if tokens:
        at = data.draw(st.integers(0, len(tokens) - 1))
        changed = [*tokens[:at], (tokens[at] + 1) % 2**32, *tokens[at + 1 :]]
        others = block_hashes(changed, block_size)
        assert [a == b for a, b in zip(hashes, others, strict=True)] == [i < at // block_size for i in range(len(hashes))]
