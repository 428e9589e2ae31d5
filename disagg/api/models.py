"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from disagg.api.services import SERVICES, Services
from disagg.errors import InvalidRequestError


async def list_models(http: web.Request) -> web.Response:
    return _answer({"object": "list", "data": [_model(http.app[SERVICES])]})


async def get_model(http: web.Request) -> web.Response:
    services = http.app[SERVICES]
    if http.match_info["id"] != services.model_name:
        message = f"this server has only the model '{services.model_name}'"
        raise InvalidRequestError(message, param="model", code="model_not_found", status=404)
    return _answer(_model(services))


def _model(services: Services) -> dict[str, Any]:
    return {
        "id": services.model_name,
        "object": "model",
        "created": services.created,
        "owned_by": "disagg",
        "max_model_len": services.max_model_len,
    }


def _answer(body: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")
