"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from disagg.api.answers import json_answer
from disagg.api.services import SERVICES, Services
from disagg.api.validate import check_model


async def list_models(http: web.Request) -> web.Response:
    return json_answer({"object": "list", "data": [_model(http.app[SERVICES])]})


async def get_model(http: web.Request) -> web.Response:
    services = http.app[SERVICES]
    check_model(http.match_info["id"], services)
    return json_answer(_model(services))


def _model(services: Services) -> dict[str, Any]:
    return {
        "id": services.model_name,
        "object": "model",
        "created": services.created,
        "owned_by": "disagg",
        "max_model_len": services.max_model_len,
    }
