"""Log-probabilities in the two shapes of OpenAI's endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disagg.api.choice import LoggedToken
from disagg.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Written for minus infinity, which JSON does not have."""


def chat_logprobs(tokenizer: Tokenizer, logged: Sequence[LoggedToken], num_top: int) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token),
            "logprob": max(logprob, LOWEST),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    return {
        "content": [
            {
                **entry(item.token, item.logprobs.logprob),
                "top_logprobs": [entry(token, logprob) for token, logprob in item.logprobs.top[:num_top]],
            }
            for item in logged
            if item.logprobs is not None
        ]
    }


def completion_logprobs(tokenizer: Tokenizer, logged: Sequence[LoggedToken], num_top: int) -> dict[str, Any]:
    """``top_logprobs`` holds the ``num_top`` best and the token itself: one more where it is not among them."""
    top_logprobs: list[dict[str, float] | None] = []
    for item in logged:
        if item.logprobs is None:
            top_logprobs.append(None)
            continue
        best: dict[str, float] = {}
        for token, logprob in [*item.logprobs.top[:num_top], (item.token, item.logprobs.logprob)]:
            best.setdefault(_written(tokenizer, token), max(logprob, LOWEST))
        top_logprobs.append(best)
    return {
        "tokens": [_written(tokenizer, item.token) for item in logged],
        "token_logprobs": [None if item.logprobs is None else max(item.logprobs.logprob, LOWEST) for item in logged],
        "top_logprobs": top_logprobs,
        "text_offset": [item.start for item in logged],
    }


def _written(tokenizer: Tokenizer, token: int) -> str:
    """The token's text, or its bytes where they are only part of a character: as text, all such tokens would be one key."""
    text = tokenizer.token_text(token)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token))
