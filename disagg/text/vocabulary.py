"""Where a tokenizer comes from: the one interface that GGUF files, Hugging Face folders and the null model implement."""

from __future__ import annotations

from typing import Protocol

import tokenizers


class Vocabulary(Protocol):
    """What a model's files say about its text. Each method reads the files again; callers keep what they need."""

    def backend(self) -> tokenizers.Tokenizer:
        """The vocabulary and its splitting rules. Raises UnsupportedModelError for what this version cannot reproduce."""
        ...

    def bos_token_ids(self, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
        """The ids that belong before a plain prompt: empty, or one BOS."""
        ...

    def eos_token_ids(self, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
        """The ids that end an answer."""
        ...

    def special_names(self) -> dict[str, str]:
        """What chat templates know as ``bos_token``, ``eos_token``, …: the texts of those that the model has."""
        ...

    def chat_template(self) -> str | None:
        """Jinja source of the default chat template."""
        ...
