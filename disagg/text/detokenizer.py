"""Text out of a stream of token ids, as soon as it is certain.

A token is bytes, not characters. An incomplete character waits for its other bytes; a byte that can no longer become part of
one turns into U+FFFD at once. What was pushed and flushed is, together, exactly ``Tokenizer.decode`` of the ids.
"""

from __future__ import annotations

import codecs

from disagg.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One stream. ``continues``: the ids go on after an earlier text, so a leading space belongs to the text and stays."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = False) -> None:
        self._bytes_of = tokenizer.byte_table(skip_special=skip_special).get
        self._decode = _Utf8Decoder("replace").decode
        self._strips_space = tokenizer.strips_leading_space and not continues

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` makes certain; often "" in scripts whose characters span tokens."""
        text = self._decode(self._bytes_of(token_id, b""))
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """What was still waiting: the stream ended inside a character."""
        return self._decode(b"", True)
