"""A tokenizer from the metadata of a GGUF file, which carries a vocabulary but no ``tokenizer.json``.

``tokenizer.ggml.model`` names the algorithm and ``tokenizer.ggml.pre`` the way text is cut before merging. The name stands
for a rule that is written nowhere in the file, so the rules are here, each as in the tokenizer that the original model was
published with. A name that is not in the table is refused: a nearly right split gives nearly right text, and nobody notices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gguf
import tokenizers
from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from disagg.errors import ConfigError, UnsupportedModelError
from disagg.text.token_bytes import SPACE_MARK

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WHITESPACE}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WHITESPACE}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITESPACE}"
)


class _Split(NamedTuple):
    """How one family cuts text: by ``pattern`` (None: GPT-2's), perhaps digit by digit first.

    ``whole_words``: a stretch that is itself a token is taken whole, even where the merges do not lead to it.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False  # where the file does not say


_LLAMA3_SPLIT = _Split(_LLAMA3, whole_words=True, adds_bos=True)
_SPLITS = {
    "gpt-2": _Split(),
    "llama-bpe": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "qwen2": _Split(_QWEN2, nfc=True),
    "smollm": _Split(single_digits=True),
    "starcoder": _Split(single_digits=True),
    "tekken": _Split(_TEKKEN, whole_words=True, adds_bos=True),
}


class GgufVocabulary:
    """The tokenizer part of ``reader``'s metadata."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._reader = reader

    def backend(self) -> tokenizers.Tokenizer:
        match self._value("model"):
            case "gpt2":
                backend = self._byte_level()
            case "llama":
                backend = self._sentencepiece()
            case other:
                raise UnsupportedModelError(f"the GGUF file's tokenizer is {other!r}; supported are 'gpt2' and 'llama'")
        for token, kind in self._tokens():
            # Also what the tokenizer library does when it loads a file: a special token is one that decoding can skip.
            if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
                backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
            elif kind == TokenType.USER_DEFINED:
                backend.add_tokens([AddedToken(token, normalized=False, special=False)])
        return backend

    def bos_token_ids(self, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
        bos, adds = self._value("bos_token_id"), self._value("add_bos_token")
        if adds is None:
            adds = self._value("model") == "llama" or self._split().adds_bos
        return (bos,) if adds and bos is not None else ()

    def eos_token_ids(self, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
        ends = [self._value(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        return tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None))

    def special_names(self) -> dict[str, str]:
        tokens = self._value("tokens")
        named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {name: self._value(f"{key}_token_id") for name, key in named.items()}
        return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}

    def chat_template(self) -> str | None:
        field = self._reader.get_field("tokenizer.chat_template")
        return None if field is None else str(field.contents())

    def _value(self, name: str) -> Any:
        field = self._reader.get_field(f"tokenizer.ggml.{name}")
        return None if field is None else field.contents()

    def _tokens(self) -> list[tuple[str, int]]:
        """Every token with its type. What pads the table at its end, to a round number of rows, is no token."""
        names = self._value("tokens")
        if not names:
            raise ConfigError("the GGUF file has no tokenizer (tokenizer.ggml.tokens is missing)")
        tokens = list(zip(names, self._value("token_type") or [TokenType.NORMAL] * len(names)))
        while tokens[-1][1] == TokenType.UNUSED:
            tokens.pop()
        return tokens

    def _split(self) -> _Split:
        name = self._value("pre")
        if name not in _SPLITS:
            raise UnsupportedModelError(
                f"the GGUF file's pre-tokenizer is {name!r} (tokenizer.ggml.pre); supported are {', '.join(_SPLITS)}"
            )
        return _SPLITS[name]

    def _byte_level(self) -> tokenizers.Tokenizer:
        split = self._split()
        vocab = {token: token_id for token_id, (token, _) in enumerate(self._tokens())}
        merges = [tuple(merge.split(" ", 1)) for merge in self._value("merges") or []]
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_words))
        steps: list[pre_tokenizers.PreTokenizer] = []
        if split.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if split.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if split.nfc:
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self) -> tokenizers.Tokenizer:
        """BPE over pieces that carry scores in place of merges: of two neighbours, those whose joint scores best join first.

        Written as merges: every way to halve a normal piece into two normal pieces, best piece first. Control tokens and
        byte tokens are no result of a merge, so that text cannot spell them.
        """
        tokens, scores = self._tokens(), self._value("scores")
        if scores is None:
            raise ConfigError("the GGUF file's SentencePiece vocabulary has no scores (tokenizer.ggml.scores is missing)")
        score = {token: scores[i] for i, (token, kind) in enumerate(tokens) if kind == TokenType.NORMAL}
        merges = [
            (piece[:cut], piece[cut:])
            for piece in score
            for cut in range(1, len(piece))
            if piece[:cut] in score and piece[cut:] in score
        ]
        merges.sort(key=lambda merge: (-score[merge[0] + merge[1]], -len(merge[0]), -len(merge[1])))
        vocab = {token: token_id for token_id, (token, _) in enumerate(tokens)}
        unknown = next((token for token, kind in tokens if kind == TokenType.UNKNOWN), None)
        backend = tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        prefixed = self._value("add_space_prefix") is not False
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=SPACE_MARK, prepend_scheme="first" if prefixed else "never", split=False
        )
        steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
        return backend
