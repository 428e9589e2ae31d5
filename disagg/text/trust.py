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

from disagg.errors import InvalidRequestError


def unguessable() -> str:
    """Text that no client can send on purpose. Digits, because templates change case and escape what is not ASCII."""
    return "".join(secrets.choice("0123456789") for _ in range(24))


def encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """The ids of ``text`` without BOS. A batch of one: unlike ``encode`` it lets go of the GIL (95 ms for 256 KiB)."""
    return backend.encode_batch([text], add_special_tokens=False)[0].ids


class TrustingEncoder:
    """An encoder over the vocabulary of ``backend``."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._mark, nonce = unguessable(), unguessable()
        added = sorted(backend.get_added_tokens_decoder().items())
        self._aliases = {token.content: f"{nonce}.{token_id}." for token_id, token in added if token.special}
        names = "|".join(re.escape(name) for name in sorted(self._aliases, key=len, reverse=True)) or "(?!)"
        # Names can overlap, so every character where one starts gets a mark behind it, and a name so broken is not trusted.
        self._start_of_name = re.compile(rf"(?=(?:{names})).", re.DOTALL)
        self._trusted_name = re.compile(rf"(?:{names})(?!{re.escape(self._mark)})")
        self._backend = tokenizers.Tokenizer(backend.model)  # shares the vocabulary, copies nothing
        self._backend.normalizer = backend.normalizer
        self._backend.pre_tokenizer = backend.pre_tokenizer
        # The library numbers added tokens by itself, from the vocabulary's length on. Where the vocabulary's own ids have gaps,
        # fillers take the numbers that are in use, so that no alias passes for an ordinary token.
        ordinary = backend.get_vocab(with_added_tokens=False).values()
        num_gaps = max(ordinary) + 1 - len(ordinary)
        self._backend.add_tokens([AddedToken(f"{nonce}-{i}.") for i in range(num_gaps)])
        self._true_ids = {}
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

    def distrust(self, text: str, following: str = "") -> str:
        """``text`` with a mark inside everything that looks like a control token; nearly always ``text`` unchanged.

        ``following`` is what may come right after it, and might complete one.
        """
        marked, rest = (self._start_of_name.sub(rf"\g<0>{self._mark}", part) for part in (text + following, following))
        return marked[: len(marked) - len(rest)]

    def is_marked(self, text: str) -> bool:
        return self._mark in text

    def unmark(self, text: str) -> str:
        """``text`` as it was before ``distrust``."""
        return text.replace(self._mark, "")

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, in which control tokens count unless ``distrust`` marked them."""
        trusted = self._trusted_name.sub(lambda found: self._aliases[found[0]], text)
        return self.encode_plain(self.unmark(trusted))

    def encode_plain(self, text: str) -> list[int]:
        """The ids of ``text``, in which no control token counts.

        Raises InvalidRequestError for one that this vocabulary spells from its letters all the same.
        """
        ids = encode(self._backend, text)
        for token_id in self._special.intersection(ids) - self._true_ids.keys():
            name = self._backend.id_to_token(token_id)
            raise InvalidRequestError(f"the text holds {name!r}, which is a control token to this model however it is read")
        return [self._true_ids.get(token_id, token_id) for token_id in ids]
