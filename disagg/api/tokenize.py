"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's vocabulary for clients that count or score tokens.

The shapes are vLLM's, so that what asks such a server (lm-eval's remote tokenizer, load generators) needs no model files.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from disagg.api import chat
from disagg.api.answers import json_answer
from disagg.api.read import read
from disagg.api.services import SERVICES, Services
from disagg.api.types import DetokenizeBody, TokenizeBody, parse_body
from disagg.api.validate import check_ids, check_model, invalid

_text_decoder = msgspec.json.Decoder(TokenizeBody)
_ids_decoder = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(http: web.Request) -> web.Response:
    return json_answer(await read(http, _tokenize))


async def detokenize(http: web.Request) -> web.Response:
    return json_answer(await read(http, _detokenize))


async def tokenizer_info(http: web.Request) -> web.Response:
    services = http.app[SERVICES]
    tokenizer, template = services.tokenizer, services.chat_template
    info = {
        "tokenizer_class": type(tokenizer).__name__,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")),
        **tokenizer.special_names,
        "add_bos_token": bool(tokenizer.bos_token_ids),
        "model_max_length": services.max_model_len,
        "chat_template": None if template is None else template.source,
    }
    return json_answer(info)


def _tokenize(raw: bytes, services: Services) -> dict[str, Any]:
    """The answer to a prompt or to messages.

    A little longer than the context is no fault: who asks may want to know by how much.
    """
    body = parse_body(raw, _text_decoder)
    check_model(body.model, services)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "either a prompt or messages must be given, and not both")
    tokenizer = services.tokenizer
    if body.prompt is not None:
        tokenizer.require_fit(body.prompt, services.max_model_len, "prompt")
        ids = tokenizer.encode(body.prompt, add_bos=body.add_special_tokens is not False)
    else:  # the template writes its own BOS, so that one more must be asked for
        given = parse_body(raw, chat.decoder)
        ids = chat.render(given, services, chat.tools_of(given, services))
        ids = [*tokenizer.bos_token_ids, *ids] if body.add_special_tokens else ids
    return {
        "count": len(ids),
        "max_model_len": services.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.token_name(token) for token in ids] if body.return_token_strs else None,
    }


def _detokenize(raw: bytes, services: Services) -> dict[str, Any]:
    body = parse_body(raw, _ids_decoder)
    check_model(body.model, services)
    check_ids("tokens", body.tokens, services)
    return {"prompt": services.tokenizer.decode(body.tokens, skip_special=False)}
