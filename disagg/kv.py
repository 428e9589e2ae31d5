"""The KV cache's shape, its fingerprint, and the identity of blocks. No torch here: the parent and the transports use it.

A worker's pool is one allocation, ``pool[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``. One block
holds ``block_size`` tokens of ALL layers, so handing one over is one contiguous copy.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What two workers must agree on before a byte moves between them.

    ``model`` is a digest of the model's configuration and weights' identity: the same shape from another model is
    still somebody else's cache.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int  # tokens
    head_dim: int
    dtype: str  # a key of ITEMSIZE
    model: str
    arithmetic: str = ""  # what is rounded on the way: tokens of one request must not see two kinds
    order: str = "block,layer,kv,head,slot,dim"

    @property
    def block_nbytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * ITEMSIZE[self.dtype]

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        return (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks needed to hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def fingerprint(self) -> str:
        """32 hex digits; equal exactly when every field is equal."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()

    def difference(self, other: KVLayout) -> str | None:
        """A sentence naming each field that differs, or None when the layouts agree."""
        ours, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        parts = [f"{name} {ours[name]!r} here, {theirs[name]!r} there" for name in ours if ours[name] != theirs[name]]
        return "KV layouts differ: " + "; ".join(parts) if parts else None


def block_hashes(tokens: Sequence[int], block_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """Chained digests of the full blocks of ``tokens``: equal digest means equal tokens in this block and all before it.

    ``known`` are digests computed earlier for the same tokens; only the blocks after them are hashed.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else b""
    for index in range(len(hashes), len(tokens) // block_size):
        chunk = array("I", tokens[index * block_size : (index + 1) * block_size])
        parent = hashlib.blake2b(parent + chunk.tobytes(), digest_size=16).digest()
        hashes.append(parent)
    return hashes
