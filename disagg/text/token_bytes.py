"""The bytes that each token stands for, worked out once per vocabulary.

A vocabulary spells its tokens in one of two ways, and the decoder in the tokenizer's own description says which:

- byte-level (GPT-2 and its heirs): every byte has a printable stand-in, so the space of " the" is written "Ġ";
- SentencePiece: a space is written "▁", and a byte that belongs to no piece is a token such as "<0xE4>".

With this table, text is made by joining bytes, and a stream needs no look at earlier tokens: a character that is split
over tokens is a UTF-8 sequence that is not complete yet. Bytes that are not UTF-8 become U+FFFD by the usual rule (one for
each maximal broken sequence); the ``tokenizers`` library does the same for byte-level vocabularies, but replaces every byte
of a broken ``<0x..>`` run, which nobody can know while it still streams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from disagg.errors import UnsupportedModelError

SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_STEPS = [
    {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins: printable Latin-1 characters mean themselves, the other bytes follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def token_bytes(backend: tokenizers.Tokenizer) -> tuple[dict[int, bytes], bool]:
    """``(table, strips_leading_space)``: the bytes of every id that exists, and whether a text loses its first space.

    Special tokens stand for their own names. Raises UnsupportedModelError for a decoder of neither kind.
    """
    spell, strips_leading_space = _spelling(backend)
    table = {token_id: spell(token) for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    for token_id, added in backend.get_added_tokens_decoder().items():
        if added.special or spell is _byte_level:
            table[token_id] = added.content.encode()  # added tokens are matched in raw text, so that is what they stand for
    return table, strips_leading_space


def _spelling(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    steps = _steps(json.loads(backend.decoder.__getstate__())) if backend.decoder is not None else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, False
    if kinds == ["Metaspace"] and steps[0]["replacement"] == SPACE_MARK:
        return _pieces, steps[0]["prepend_scheme"] != "never"
    if kinds[:1] == ["Replace"] and all(step in _SENTENCEPIECE_STEPS for step in steps):
        return _pieces_and_bytes if "ByteFallback" in kinds else _pieces, "Strip" in kinds
    raise UnsupportedModelError(
        f"the tokenizer's decoder is {kinds or 'absent'}; supported are byte-level, Metaspace and SentencePiece decoders"
    )


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _byte_level(token: str) -> bytes:
    if all(char in BYTE_ALPHABET for char in token):
        return bytes(BYTE_ALPHABET[char] for char in token)
    return token.encode()


def _pieces(token: str) -> bytes:
    return token.replace(SPACE_MARK, " ").encode()


def _pieces_and_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else _pieces(token)
