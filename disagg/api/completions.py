"""POST /v1/completions: raw prompts, as text or token ids; echo and scoring."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
from aiohttp import web

from disagg.api.chunks import Chunks, Shape
from disagg.api.generate import serve
from disagg.api.logprobs import completion_logprobs
from disagg.api.read import read
from disagg.api.services import Services
from disagg.api.structured import requested_form
from disagg.api.types import CompletionBody, parse_body
from disagg.api.validate import (
    Answer,
    Work,
    build_work,
    check_num_choices,
    check_shared,
    invalid,
    mint_id,
    unsupported,
)

DEFAULT_MAX_TOKENS = 16

_decoder = msgspec.json.Decoder(CompletionBody)

_SHAPE = Shape(
    object="text_completion",
    chunk_object="text_completion",
    whole=lambda text, _calls: {"text": text},
    piece=lambda text, _calls: {"text": text},
    opening=None,
    logprobs=completion_logprobs,
    has_prompt_ids_in_choice=True,
)


async def completions(http: web.Request) -> web.StreamResponse:
    return await serve(http, await read(http, plan), partial(Chunks, _SHAPE))


def plan(raw: bytes, services: Services) -> Work:
    """The body's requests. Raises InvalidRequestError. Pure, and slow for a long prompt."""
    body = parse_body(raw, _decoder)
    check_shared(body, services)
    if body.suffix:
        raise unsupported("suffix", "insertion is not supported; send the model's own fill-in-the-middle prompt")
    if body.best_of is not None:
        if body.best_of < (body.n or 1):
            raise invalid("best_of", "must be at least n")
        if body.stream and body.best_of > (body.n or 1):
            raise invalid("best_of", "more than n cannot be streamed: which are best shows at their end")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "0 is only allowed with echo")
    given = _prompts(body.prompt)
    check_num_choices(len(given), body.best_of or body.n or 1)
    tokenizer = services.tokenizer
    add_bos = body.add_special_tokens is not False
    for prompt in given:
        if isinstance(prompt, str):
            tokenizer.require_fit(prompt, services.max_model_len, "prompt")
    prompts = [tokenizer.encode(prompt, add_bos=add_bos) if isinstance(prompt, str) else prompt for prompt in given]
    is_scored = body.echo and (body.logprobs is not None or body.max_tokens == 0)
    answer = Answer(
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=(body.logprobs or 0) if is_scored else None,
        best_of=body.best_of,
        logs_stop_token=True,  # who scores a prompt with max_tokens 1 counts on one entry for the generated token
        continues=True,
        form=requested_form(body, is_supported=services.forms is not None),
    )
    work = build_work(mint_id("cmpl"), body, services, prompts, answer)
    if not body.echo:
        return work
    # Not before build_work: it has checked the ids that are decoded here.
    echo = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special=False) for prompt in given]
    return replace(work, echo=echo)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The four forms that OpenAI allows, as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [item for item in prompt if isinstance(item, int)]
    id_lists = [item for item in prompt if isinstance(item, list)]
    if not prompt:
        raise invalid("prompt", "the list is empty")
    if len(ids) == len(prompt):
        return [ids]
    if len(prompt) not in (len(texts), len(id_lists)):
        raise invalid("prompt", "a list holds strings only, or token ids only, or lists of token ids only")
    return [*texts, *id_lists]
