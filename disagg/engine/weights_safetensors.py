"""Tensors of a Hugging Face folder: one ``model.safetensors``, or shards named by ``model.safetensors.index.json``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from disagg.engine.native_llama import Stored
from disagg.errors import ConfigError, UnsupportedModelError
from disagg.model import ModelFiles

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class SafetensorsWeights:
    """The tensors of one folder, memory-mapped; a context manager. ``expected`` as in ``GgufWeights``."""

    pairs_neighbours = False

    def __init__(self, files: ModelFiles, expected: dict[str, tuple[int, ...]]) -> None:
        self._folder = files.path
        self._stack = ExitStack()
        try:
            opened = [self._stack.enter_context(safe_open(path, framework="pt")) for path in _shards(files.path)]
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise ConfigError(f"model.path: {files.path}: weights cannot be read: {error}") from error
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 (not a mapping)
        # Older checkpoints store the rotary table, and tied ones a second copy of the embedding: both are computed here.
        found = {name for name in self._files if not name.endswith("rotary_emb.inv_freq")} - {"lm_head.weight"}
        missing, unexpected = sorted(expected.keys() - self._files.keys()), sorted(found - expected.keys())
        if missing or unexpected:
            self._stack.close()
            raise UnsupportedModelError(f"{files.path}: tensors missing: {missing[:8]}; tensors without a use: {unexpected[:8]}")

    def __enter__(self) -> SafetensorsWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise UnsupportedModelError(f"{self._folder}: {name} has shape {tuple(tensor.shape)}, config.json says {shape}")
        if not tensor.dtype.is_floating_point:
            raise UnsupportedModelError(f"{self._folder}: {name} has type {tensor.dtype}; supported: float32, float16, bfloat16")
        return tensor

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        """The tensor in the file's own type, mapped. Raises UnsupportedModelError as ``read`` does."""
        tensor = self.read(name, shape).contiguous()
        if tensor.dtype not in _KINDS:
            tensor = tensor.to(torch.float32)
        return Stored(_KINDS[tensor.dtype], tensor.data_ptr(), tensor)


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return [folder / _SINGLE]
    try:
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"model.path: {index} cannot be read: {error}") from error
    return [folder / name for name in dict.fromkeys(names)]
