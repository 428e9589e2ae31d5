"""Control tokens in text are a matter of trust.

A raw prompt may use them. What a chat participant wrote may not, yet it stands in one text with the control tokens that the
chat template wrote, and must be tokenised in one piece with it, or the ids around it change. So there is a second encoder over
the same vocabulary that knows control tokens by aliases only: random strings, new in each process, that no client can send.
Trusted control tokens are replaced by their aliases before encoding; to this encoder all others are plain text.

    participant's text ── distrust ──▶ marked text ── template ──▶ rendered text ── encode ──▶ ids
"""

from __future__ import annotations

import re
import secrets

import tokenizers
from tokenizers import AddedToken

from disagg.errors import InvalidRequestError, UnsupportedModelError

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # assigned to nobody, and the same in upper and lower case


class TrustingEncoder:
    """Raises UnsupportedModelError for a vocabulary with gaps between its ids, where an alias could pass for a token."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        nonce = "".join(secrets.choice(_NONCHARACTERS) for _ in range(16))
        self._mark = f"{nonce}."
        added = sorted(backend.get_added_tokens_decoder().items())
        self._aliases = {token.content: f"{nonce}{token_id}{nonce}" for token_id, token in added if token.special}
        names = "|".join(re.escape(name) for name in sorted(self._aliases, key=len, reverse=True)) or "(?!)"
        # Names can overlap, so every character where one starts gets a mark behind it, and a name so broken is not trusted.
        self._start_of_name = re.compile(rf"(?=(?:{names})).", re.DOTALL)
        self._trusted_name = re.compile(rf"(?:{names})(?!{re.escape(self._mark)})")
        self._backend = tokenizers.Tokenizer(backend.model)  # shares the vocabulary, copies nothing
        self._backend.normalizer = backend.normalizer
        self._backend.pre_tokenizer = backend.pre_tokenizer
        self._true_ids = {}  # the library numbers added tokens by itself
        for token_id, token in added:
            alias = AddedToken(
                self._aliases.get(token.content, token.content),
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
            )
            self._backend.add_tokens([alias])
            self._true_ids[self._backend.token_to_id(alias.content)] = token_id
        self._special = {token_id for token_id, token in added if token.special}
        ordinary = set(backend.get_vocab(with_added_tokens=False).values()) - self._special
        if any(alias in ordinary and alias != token_id for alias, token_id in self._true_ids.items()):
            raise UnsupportedModelError("the tokenizer's vocabulary has gaps between its ids")

    def distrust(self, text: str, following: str = "") -> str:
        """``text`` with a mark inside everything that looks like a control token; nearly always ``text`` unchanged.

        ``following`` is what may come right after it, and might complete one.
        """
        marked, rest = (self._start_of_name.sub(rf"\g<0>{self._mark}", part) for part in (text + following, following))
        return marked[: len(marked) - len(rest)]

    def is_marked(self, text: str) -> bool:
        return self._mark in text

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, in which control tokens count unless ``distrust`` marked them."""
        trusted = self._trusted_name.sub(lambda found: self._aliases[found[0]], text)
        return self.encode_plain(trusted.replace(self._mark, ""))

    def encode_plain(self, text: str) -> list[int]:
        """The ids of ``text``, in which no control token counts.

        Raises InvalidRequestError for one that this vocabulary spells from its letters all the same.
        """
        ids = self._backend.encode(text, add_special_tokens=False).ids
        for token_id in self._special.intersection(ids) - self._true_ids.keys():
            name = self._backend.id_to_token(token_id)
            raise InvalidRequestError(f"the text holds {name!r}, which is a control token to this model however it is read")
        return [self._true_ids.get(token_id, token_id) for token_id in ids]
