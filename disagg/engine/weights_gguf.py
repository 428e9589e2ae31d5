"""Tensors of a GGUF file, dequantised one at a time to float32 (exactly what the quantised file says)."""

from __future__ import annotations

import gguf
import torch
from gguf.quants import dequantize
from torch import Tensor

from disagg.engine.native_llama import Stored
from disagg.errors import UnsupportedModelError
from disagg.model import ModelFiles, ModelSpec, open_gguf

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NOT_WEIGHTS = {"rope_freqs.weight"}  # read with the specification
_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def gguf_name(name: str) -> str:
    """Hugging Face's name of a tensor → GGUF's."""
    if name in _NAMES:
        return _NAMES[name]
    _, _, index, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{index}.{_LAYER_NAMES[module]}.{kind}"


class GgufWeights:
    """The tensors of one file. Raises UnsupportedModelError at once for tensors that ``expected`` does not name."""

    def __init__(self, files: ModelFiles, spec: ModelSpec, expected: dict[str, tuple[int, ...]]) -> None:
        self._path = files.path
        self._tensors = {tensor.name: tensor for tensor in open_gguf(files.path).tensors}
        # llama.cpp's converter reorders q and k of this architecture for neighbouring pairs, and of no other.
        self.pairs_neighbours = spec.architecture == "llama"
        names = {gguf_name(name) for name in expected}
        missing, unexpected = sorted(names - self._tensors.keys()), sorted(self._tensors.keys() - names - _NOT_WEIGHTS)
        if missing or unexpected:
            raise UnsupportedModelError(f"{files.path}: tensors missing: {missing[:8]}; tensors without a use: {unexpected[:8]}")

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._find(name, shape)
        values = dequantize(tensor.data, gguf.GGMLQuantizationType(tensor.tensor_type))
        return torch.tensor(values) if values.base is not None else torch.from_numpy(values)

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        """The tensor in the file's own blocks, mapped. Raises UnsupportedModelError as ``read`` does."""
        tensor = self._find(name, shape)
        return Stored(tensor.tensor_type.name, tensor.data.ctypes.data, tensor.data)

    def _find(self, name: str, shape: tuple[int, ...]) -> gguf.ReaderTensor:
        tensor = self._tensors[gguf_name(name)]
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != shape:
            raise UnsupportedModelError(f"{self._path}: {tensor.name} has shape {found}, the metadata says {shape}")
        if tensor.tensor_type.name not in _TYPES:
            raise UnsupportedModelError(
                f"{self._path}: {tensor.name} has type {tensor.tensor_type.name}; supported: {', '.join(_TYPES)}"
            )
        return tensor
