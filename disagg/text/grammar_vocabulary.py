"""The vocabulary as grammars know it: the bytes of every token, and which tokens are no text."""

from __future__ import annotations

from disagg.grammar import Vocabulary
from disagg.text.tokenizer import Tokenizer


def grammar_vocabulary(tokenizer: Tokenizer, size: int | None = None) -> Vocabulary:
    """``size``: ids at and above it are never sampled, though the tokenizer may know them. None: all are."""
    size = tokenizer.vocab_size if size is None else size
    return Vocabulary(
        tokens=[tokenizer.token_bytes(token) for token in range(size)],
        special=frozenset(token for token in range(size) if tokenizer.is_special(token)),
        ends=tuple(token for token in tokenizer.eos_token_ids if token < size),
    )
