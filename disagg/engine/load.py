"""Files → a ready engine."""

from __future__ import annotations

import msgspec
import structlog
import torch

from disagg.engine.base import Engine, Progress
from disagg.engine.llama import Llama, tensor_shapes
from disagg.engine.native_llama import NativeLlama, native_crew
from disagg.engine.null import NullEngine
from disagg.engine.torch_engine import Model, TorchEngine
from disagg.engine.weights_gguf import GgufWeights
from disagg.engine.weights_safetensors import SafetensorsWeights
from disagg.errors import ConfigError
from disagg.grammar import Matchers
from disagg.kernels.native import ORDER, POOL_TYPES
from disagg.model import ModelFiles, kv_layout, read_model_spec

log = structlog.get_logger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_engine(
    files: ModelFiles,
    *,
    dtype: str,
    kv_dtype: str = "",
    block_size: int,
    vocab_size: int,
    device: str,
    progress: Progress,
    num_threads: int = 0,
    quantize: str = "none",
    activations: str = "int8",
    compiler: Matchers | None = None,
) -> Engine:
    """Read the model and build its engine.

    ``dtype``: float32 or bfloat16. ``kv_dtype``: the pool's, one of these or float16; empty = ``dtype``. ``quantize``: none, or
    int8 for weights that are stored as floats. ``activations``: int8 or float32, what quantised weights are multiplied with;
    torch alone always computes as for float32. ``vocab_size``: the tokenizer's; ids at and above it are never sampled.
    ``num_threads``: to compute with; 0 = as many as torch found cores, which may have been before this process was confined to
    some. ``compiler``: for requests with a grammar; None = there will be none.

    Raises ConfigError, or UnsupportedModelError for weights that do not fit the model's description.
    """
    spec = read_model_spec(files)
    layout = kv_layout(spec, kv_dtype or dtype, block_size, quantize, activations)
    if files.kind == "null":
        return NullEngine(layout, compiler)
    if device != "cpu":
        raise ConfigError(f"workers.device: {device!r} is not supported by this version; use cpu")
    if dtype not in _DTYPES:
        raise ConfigError(f"model.dtype: {dtype!r}; supported: {', '.join(_DTYPES)}")
    if num_threads:
        torch.set_num_threads(num_threads)
    expected = tensor_shapes(spec)

    def build(weights: GgufWeights | SafetensorsWeights) -> Model:
        fits = dtype == "float32" and layout.dtype in POOL_TYPES
        if fits and (crew := native_crew(spec, torch.get_num_threads())) is not None:
            torch.set_num_threads(1)  # its threads wait by spinning, on the cores of the crew; sampling alone is little work
            return NativeLlama(
                spec, weights, crew, quantize=quantize == "int8", in_bytes=activations == "int8", progress=progress
            )
        if quantize != "none":
            raise ConfigError(f"model.quantize = {quantize} needs model.dtype = float32 and the compiled kernels")
        if dtype == "float32":
            log.warning("computing with torch alone: the compiled kernels were not built here, or do not fit this model")
        return Llama(spec, weights, dtype=_DTYPES[dtype], device=torch.device(device), progress=progress)

    if files.kind == "gguf":
        model = build(GgufWeights(files, spec, expected))
    else:
        with SafetensorsWeights(files, expected) as weights:
            model = build(weights)
    if isinstance(model, NativeLlama):
        layout = msgspec.structs.replace(layout, order=ORDER)
    return TorchEngine(model, layout, vocab_size=vocab_size, compiler=compiler)
