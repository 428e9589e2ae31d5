"""The tokenizer of a Hugging Face model folder: ``tokenizer.json`` and the JSON files around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from disagg.errors import ConfigError

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class HfVocabulary:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = self._json("special_tokens_map.json") | self._json("tokenizer_config.json")

    def backend(self) -> tokenizers.Tokenizer:
        path = self._folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{self._folder} has no tokenizer.json (saving the model with a fast tokenizer writes one)")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} cannot be read: {error}") from error
        backend.no_truncation()  # a training leftover in many folders; it would cut prompts silently
        backend.no_padding()
        return backend

    def bos_token_ids(self, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
        adds = self._config.get("add_bos_token")
        if adds is not None:
            bos = backend.token_to_id(self.special_names().get("bos_token", ""))
            return (bos,) if adds and bos is not None else ()
        # Else the post-processor decides: what it puts before a text. What it may put after one would end a prompt.
        bare, full = (backend.encode("a", add_special_tokens=flag).ids for flag in (False, True))
        start = next(i for i in range(len(full) + 1) if full[i : i + len(bare)] == bare)
        return tuple(full[:start])

    def eos_token_ids(self, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
        """What generation_config.json (else config.json) names, and the tokenizer's own: chat tunes often change only one."""
        ends = self._json("generation_config.json").get("eos_token_id")
        if ends is None:
            ends = self._json("config.json").get("eos_token_id")
        ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
        own = backend.token_to_id(self.special_names().get("eos_token", ""))
        return tuple(dict.fromkeys([*ids, *([own] if own is not None else [])]))

    def special_names(self) -> dict[str, str]:
        values = {name: self._config.get(name) for name in _NAMES}
        return {
            name: value["content"] if isinstance(value, dict) else value for name, value in values.items() if value is not None
        }

    def chat_template(self) -> str | None:
        """From its own file where there is one, which is also where newer folders keep it; else from tokenizer_config.json."""
        path = self._folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = self._json("chat_template.json").get("chat_template") or self._config.get("chat_template")
        if isinstance(template, list):
            template = {named["name"]: named["template"] for named in template}.get("default")
        return template

    def _json(self, name: str) -> dict[str, Any]:
        """The object in file ``name``, empty where there is no such file."""
        path = self._folder / name
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{path} does not hold a JSON object")
        return content
