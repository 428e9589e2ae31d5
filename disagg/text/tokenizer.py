"""Text to token ids and back.

Encoding is the ``tokenizers`` library's (``disagg.text.trust`` says how control tokens in it are told from text); decoding is
a table of bytes (``disagg.text.token_bytes``), so that whole texts and streams come from one rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tokenizers

from disagg.errors import InvalidRequestError
from disagg.model import ModelFiles, open_gguf
from disagg.text.gguf_tokenizer import GgufVocabulary
from disagg.text.hf_tokenizer import HfVocabulary
from disagg.text.null_vocabulary import NullVocabulary
from disagg.text.token_bytes import token_bytes
from disagg.text.trust import TrustingEncoder, encode
from disagg.text.vocabulary import Vocabulary


class Tokenizer:
    """``vocab_size`` counts the ids up to the highest that exists; ``eos_token_ids`` end an answer.

    ``bos_token_ids`` belong before a plain prompt. ``special_names`` are the texts of ``bos_token``, ``eos_token``, …
    ``strips_leading_space``: the first space of a decoded text is an artefact of the vocabulary and is dropped.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...] = (),
        bos_token_ids: tuple[int, ...] = (),
        special_names: Mapping[str, str] | None = None,
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self.bos_token_ids = bos_token_ids
        self.special_names = special_names or {}
        self._backend = backend
        self._trusting = TrustingEncoder(backend)
        self._bytes, self.strips_leading_space = token_bytes(backend)
        self.vocab_size = max(self._bytes) + 1
        self._longest_token = max(map(len, self._bytes.values()))  # in bytes, so in characters at most that
        self._special = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        self._visible = {token_id: text for token_id, text in self._bytes.items() if token_id not in self._special}

    def require_fit(self, text: str, max_tokens: int, param: str) -> None:
        """Raises InvalidRequestError for a text so long that it cannot be ``max_tokens`` or fewer.

        Encoding takes seconds per megabyte. No token stands for more than the longest, so this much can be said before.
        """
        if len(text) > max_tokens * self._longest_token:
            raise InvalidRequestError(
                f"this model's maximum context length is {max_tokens} tokens, but the prompt has {len(text)} characters, "
                f"and no token has more than {self._longest_token}",
                param=param,
                code="context_length_exceeded",
            )

    def encode(self, text: str, *, allow_special: bool = True, add_bos: bool = True) -> list[int]:
        """The ids of ``text``.

        ``allow_special`` False tokenises text that looks like a control token as plain text. ``add_bos`` puts BOS in front
        for models that want it. Raises InvalidRequestError for text that is not Unicode (a lone surrogate), or that holds a
        control token which this vocabulary cannot spell any other way.
        """
        _require_unicode(text)
        ids = encode(self._backend, text) if allow_special else self._trusting.encode_plain(text)
        return [*self.bos_token_ids, *ids] if add_bos else ids

    def distrust(self, text: str, following: str = "") -> str:
        """``text`` prepared for ``encode_trusted``: what looks like a control token in it will not count as one.

        ``following`` is what may come right after it, and might complete one.
        """
        return self._trusting.distrust(text, following)

    def unmark(self, text: str) -> str:
        """``text`` as it was before ``distrust``."""
        return self._trusting.unmark(text)

    def encode_trusted(self, text: str) -> list[int]:
        """The ids of ``text``, without BOS, where control tokens count except in what went through ``distrust``."""
        if not self._trusting.is_marked(text):
            return self.encode(text, add_bos=False)
        _require_unicode(text)
        return self._trusting.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ``ids``; ids that do not exist stand for nothing."""
        table = self.byte_table(skip_special=skip_special)
        text = b"".join(table.get(token_id, b"") for token_id in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def byte_table(self, *, skip_special: bool) -> Mapping[int, bytes]:
        """The bytes of every id that shows, for decoding streams."""
        return self._visible if skip_special else self._bytes

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        """For log-probabilities: a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_name(self, token_id: int) -> str:
        """How the vocabulary itself writes the token ("Ġthe"); "" for an id that does not exist."""
        return self._backend.id_to_token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special


def _require_unicode(text: str) -> None:
    """JSON can escape half of a surrogate pair, and Python keeps it in a str."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the text holds a lone surrogate, which is not Unicode text") from error


def open_vocabulary(files: ModelFiles) -> Vocabulary:
    match files.kind:
        case "gguf":
            return GgufVocabulary(open_gguf(files.path))
        case "hf":
            return HfVocabulary(files.path)
        case "null":
            return NullVocabulary()


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The model's tokenizer. Raises ConfigError where its files are broken, UnsupportedModelError where they are beyond us."""
    vocabulary = open_vocabulary(files)
    backend = vocabulary.backend()
    return Tokenizer(
        backend,
        eos_token_ids=vocabulary.eos_token_ids(backend),
        bos_token_ids=vocabulary.bos_token_ids(backend),
        special_names=vocabulary.special_names(),
    )
