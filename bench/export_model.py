"""A GGUF model as a folder in Hugging Face's layout, in float32: the same weights for servers that read no GGUF.

python bench/export_model.py FOLDER [--model smollm2]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from disagg.engine.llama import tensor_shapes
from disagg.engine.weights_gguf import GgufWeights
from disagg.errors import UnsupportedModelError
from disagg.model import ModelFiles, ModelSpec, find_model, read_model_spec
from disagg.text.tokenizer import open_vocabulary

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def export(files: ModelFiles, folder: Path) -> None:
    """Fill ``folder`` with weights, configuration and tokenizer. Raises UnsupportedModelError for scaled rotary embeddings."""
    spec = read_model_spec(files)
    if spec.rope_scaling is not None:
        raise UnsupportedModelError(f"{files.path}: exporting a model with {spec.rope_scaling} is not supported")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(read_weights(files, spec), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(files, folder)
    eos = list(spec.eos_token_ids)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos})
    _write_json(  # last: a folder with this file is whole
        folder / "config.json",
        {
            "architectures": [_CLASSES[spec.architecture]],
            "model_type": spec.architecture,
            "dtype": "float32",
            "hidden_act": "silu",
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "vocab_size": spec.vocab_size,
            "max_position_embeddings": spec.max_position,
            "rms_norm_eps": spec.rms_norm_eps,
            "rope_theta": spec.rope_theta,
            "tie_word_embeddings": spec.tie_word_embeddings,
            "eos_token_id": eos,
        },
    )


def read_weights(files: ModelFiles, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Every tensor in float32 under Hugging Face's name, rows of q and k in the order of its rotary embedding."""
    shapes = tensor_shapes(spec)
    weights = GgufWeights(files, spec, shapes)
    tensors = {name: weights.read(name, shape) for name, shape in shapes.items()}
    if weights.pairs_neighbours:  # (x0 y0 x1 y1 …) → (x0 x1 … y0 y1 …) in every head
        for name, tensor in tensors.items():
            if "q_proj" in name or "k_proj" in name:
                pairs = tensor.view(-1, spec.head_dim // 2, 2, *tensor.shape[1:])
                tensors[name] = pairs.transpose(1, 2).reshape(tensor.shape).contiguous()
    return tensors


def write_tokenizer(files: ModelFiles, folder: Path) -> None:
    vocabulary = open_vocabulary(files)
    vocabulary.backend().save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **vocabulary.special_names()}
    if (template := vocabulary.chat_template()) is not None:
        config["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    export(find_model(args.model), args.folder)


if __name__ == "__main__":
    main()
