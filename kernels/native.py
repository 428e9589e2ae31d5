"""The compiled kernels of ``src/`` through their C interface, in the variant for the instructions that this CPU has.

They know neither Python nor torch: arrays go in by address, and calls run without the interpreter's lock. Every result is the
same bits whatever else is in the step: a row's output does not depend on the other rows, nor on the number of threads. It may
depend, in the last bits, on whether its token is the prompt's.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from disagg.kernels.paged import Work
from torch import Tensor

MOST_DIM = 256
"""Of a head. With ``MOST_GROUP``, the number of heads that share a KV head, the bounds of the kernels' scratch memory."""

MOST_GROUP = 96

ORDER = "block,layer,kv,head; keys dim,slot; values slot,dim"
"""How the kernels lay out the KV pool: the keys of a block are ready to be multiplied with."""

POOL_TYPES = ("float32", "float16")
"""Types of the KV pool; the kernels compute in float32."""

TYPES = {
    **{"F32": 0, "F16": 1, "BF16": 30},
    **{"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8},
    **{"Q4_K": 12, "Q5_K": 13, "Q6_K": 14},
}
"""Types of stored weights, under ggml's names and numbers."""


class _Layer(Structure):
    _fields_ = [(name, c_void_p) for name in (
        "attention_norm", "mlp_norm", "qk_norm", "q", "k", "v", "output", "gate", "up", "down", "q_bias", "k_bias", "v_bias",
    )]  # fmt: skip


class _Model(Structure):
    _fields_ = [
        *((name, c_int) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate", "vocab")),
        ("epsilon", c_float),
        ("layers", POINTER(_Layer)),
        *((name, c_void_p) for name in ("embedding", "head", "norm", "turns")),
        ("in_bytes", c_int),
    ]


class _Span(Structure):
    _fields_ = [
        ("blocks", POINTER(c_int32)),
        ("start", c_int32),
        ("num_tokens", c_int32),
        ("row", c_int32),
        ("is_prompt", c_int32),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "may_run": (c_int, []),
    "crew_new": (c_void_p, [c_int]),
    "crew_free": (None, [c_void_p]),
    "matrix_new": (c_void_p, [c_void_p, c_int, c_void_p, c_int, c_int, c_void_p]),
    "matrix_free": (None, [c_void_p]),
    "matrix_bytes": (c_int64, [c_void_p]),
    "matrix_row": (None, [c_void_p, c_int, c_void_p]),
    "product": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_int, c_int]),
    "scratch_new": (c_void_p, []),
    "scratch_free": (None, [c_void_p]),
    "forward": (None, [
        POINTER(_Model), c_void_p, c_void_p, c_void_p, c_int, c_int, POINTER(_Span), c_int, POINTER(c_int32), c_int, c_void_p,
    ]),
    "logits": (None, [POINTER(_Model), c_void_p, c_void_p, c_void_p, c_int, c_void_p]),
}  # fmt: skip


_AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
_VARIANTS = {
    "amx": {*_AVX512, "amx_tile", "amx_int8", "amx_bf16"},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"},
    "neon": {"asimd", "asimddp"},
}
"""Best first, with what the compiler was allowed to use (setup.py), under the kernel's names."""


def variants() -> list[str]:
    """What this CPU can run of what may have been built, best first."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    has = set(found[1].split()) if found else set()
    return [name for name, needs in _VARIANTS.items() if needs <= has]


@cache
def library(variant: str) -> ctypes.CDLL | None:
    """One variant, None if it was not built (there was no compiler) or the operating system denies this process its registers."""
    for path in Path(__file__).parent.glob(f"_native_{variant}.*so"):
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"disagg_{name}")
            function.restype, function.argtypes = result, arguments
        return loaded if loaded.disagg_may_run() else None
    return None


def best_library() -> ctypes.CDLL | None:
    return next((found for variant in variants() if (found := library(variant)) is not None), None)


class Crew:
    """The threads that share the work of every call; the caller's is one of them."""

    def __init__(self, lib: ctypes.CDLL, num_threads: int) -> None:
        self.lib, self.num_threads = lib, num_threads
        self.handle = lib.disagg_crew_new(num_threads)

    def __del__(self) -> None:
        self.lib.disagg_crew_free(self.handle)


class Matrix:
    """Packed weights ``[rows, cols]``: the values of the file in another order, still as small as there."""

    def __init__(self, crew: Crew, kind: int, address: int, shape: tuple[int, int], order: Tensor | None = None) -> None:
        """``kind``: of ``TYPES``. ``address``: of the rows, not needed later. ``order``: int32; row i is the file's order[i].

        Raises ValueError for columns that are no whole number of the type's groups, MemoryError.
        """
        self._crew, self.shape = crew, shape
        rows, cols = shape
        self.handle = crew.lib.disagg_matrix_new(
            crew.handle, kind, address, rows, cols, None if order is None else order.data_ptr()
        )
        if not self.handle:
            raise ValueError(f"weights [{rows}, {cols}] of type {kind} cannot be packed")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._crew.lib.disagg_matrix_free(self.handle)

    @property
    def nbytes(self) -> int:
        return int(self._crew.lib.disagg_matrix_bytes(self.handle))

    def row(self, index: int) -> Tensor:
        """float32 [cols]"""
        out = torch.empty(self.shape[1])
        self._crew.lib.disagg_matrix_row(self.handle, index, out.data_ptr())
        return out

    def product(
        self,
        x: Tensor,
        *,
        up: Matrix | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        in_bytes: bool = False,
    ) -> Tensor:
        """``x Wᵀ + bias``, or ``silu(x Wᵀ) (x Uᵀ)``, and ``+ residual``; float32 [tokens, rows] of a contiguous ``x``.

        ``in_bytes``: x is rounded to bytes with a scale for each 32 values, where the weights are quantised.
        """
        y = torch.empty(len(x), self.shape[0]) if residual is None else residual.clone()
        self._crew.lib.disagg_product(
            self._crew.handle, self.handle, up and up.handle, None if bias is None else bias.data_ptr(), x.data_ptr(), len(x),
            y.data_ptr(), residual is not None, in_bytes,
        )  # fmt: skip
        return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights of one layer; vectors are contiguous float32."""

    attention_norm: Tensor
    mlp_norm: Tensor
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]
    q: Matrix
    k: Matrix
    v: Matrix
    output: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None


class Decoder:
    """A whole decoder: one call a step."""

    def __init__(
        self,
        crew: Crew,
        layers: Sequence[Layer],
        *,
        embedding: Matrix,
        head: Matrix,
        norm: Tensor,
        turns: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        epsilon: float,
        in_bytes: bool,
    ) -> None:
        """``turns``: complex64 [positions, head_dim / 2]. Neighbouring dimensions of q and k are turned together.

        ``in_bytes``: rows meet quantised weights as bytes, see ``Matrix.product``.
        """
        self._crew = crew
        self._keep = (layers, embedding, head, norm, turns)
        table = (_Layer * len(layers))(
            *(_Layer(**{name: _address(getattr(layer, name)) for name, _ in _Layer._fields_}) for layer in layers)  # type: ignore[misc]
        )
        self._model = _Model(
            num_layers=len(layers), hidden=embedding.shape[1], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            intermediate=layers[0].gate.shape[0], vocab=head.shape[0], epsilon=epsilon, layers=table, embedding=embedding.handle,
            head=head.handle, norm=norm.data_ptr(), turns=turns.data_ptr(), in_bytes=in_bytes,
        )  # fmt: skip
        self._scratch = crew.lib.disagg_scratch_new()

    def __del__(self) -> None:
        self._crew.lib.disagg_scratch_free(self._scratch)

    def forward(self, works: Sequence[Work], tokens: Sequence[int], pool: Tensor) -> Tensor:
        """The last layer's output, float32 [tokens, hidden], of ``tokens``, the works' one after another; writes their KV.

        ``pool``: of ``POOL_TYPES``, [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] in size, in the ``ORDER``.
        """
        row, table = 0, (_Span * len(works))()
        for entry, work in zip(table, works):
            entry.blocks = (c_int32 * len(work.blocks))(*work.blocks)
            entry.start, entry.num_tokens, entry.row, entry.is_prompt = work.start, work.num_tokens, row, work.is_prompt
            row += work.num_tokens
        hidden = torch.empty(row, self._model.hidden)
        self._crew.lib.disagg_forward(
            self._model, self._crew.handle, self._scratch, pool.data_ptr(), pool.dtype == torch.float16, pool.shape[4],
            table, len(works), (c_int32 * row)(*tokens), row, hidden.data_ptr(),
        )  # fmt: skip
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab] of rows of ``forward``'s output."""
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self._model.vocab)
        self._crew.lib.disagg_logits(
            self._model, self._crew.handle, self._scratch, hidden.data_ptr(), len(hidden), out.data_ptr()
        )
        return out


def _address(value: Matrix | Tensor | None) -> int | None:
    if value is None:
        return None
    return int(value.handle) if isinstance(value, Matrix) else value.data_ptr()
