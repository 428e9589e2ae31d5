"""The surface around generation: errors in JSON on every route, health, models, metrics, request ids, limits."""

from __future__ import annotations

import gzip

import pytest
from prometheus_client import CollectorRegistry, Counter

from disagg.config import ServerConfig
from disagg.errors import OverloadedError, UnavailableError
from tests.unit.api.fakes import MODEL, FakeRouter, async_test, says, serving


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_url"),
        ("POST", "/v1/unknown", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/another", 404, "model_not_found"),
    ],
)
@async_test
async def test_unknown_routes_and_methods_are_errors_in_json(method: str, path: str, status: int, code: str) -> None:
    """404 and 405 have OpenAI's envelope; 405 says what is allowed."""
    async with serving(FakeRouter()) as client, client.http.request(method, path) as response:
        body = await response.json()
        assert (response.status, body["error"]["code"]) == (status, code)
        assert response.headers["Content-Type"].startswith("application/json")
        assert ("Allow" in response.headers) == (status == 405)


@async_test
async def test_metrics_are_labelled_by_route_never_by_path() -> None:
    """What clients put into a URL makes no new series."""
    async with serving(FakeRouter()) as client:
        for path in ("/a", "/b", "/v1/models/x", "/v1/models/y/z"):
            await client.get(path)
    assert client.metrics.requests == [("unknown", 404)] * 2 + [("/v1/models/{id}", 404)] * 2


@async_test
async def test_too_large_a_body_is_refused() -> None:
    """413 in JSON above the configured limit."""
    async with serving(FakeRouter(says("x")), config=ServerConfig(max_body_bytes=2048)) as client:
        error = await client.refused("/v1/completions", {"prompt": "x" * 4096}, status=413)
    assert error["code"] == "body_too_large"


@async_test
async def test_a_body_that_cannot_be_unpacked_is_refused() -> None:
    """A broken gzip body is the client's fault; a good one is read."""
    router = FakeRouter(says("x"))
    packed = gzip.compress(b'{"prompt": "a"}')
    async with serving(router) as client:
        status, _, _ = await client.post("/v1/completions", packed, **{"Content-Encoding": "gzip"})
        broken, _, body = await client.post("/v1/completions", b"not gzip", **{"Content-Encoding": "gzip"})
    assert (status, broken, body["error"]["type"]) == (200, 400, "invalid_request_error")


@pytest.mark.parametrize("extra", [{}, {"stream": True}])
@async_test
async def test_refusals_say_when_to_come_back(extra: dict[str, bool]) -> None:
    """Queue full: 429. Nobody can serve: 503. Both with Retry-After in whole seconds, streamed or not."""
    router = FakeRouter()
    async with serving(router) as client:
        router.refusal = OverloadedError("the queue is full", retry_after_s=2.2)
        busy, busy_headers, busy_body = await client.post("/v1/completions", {"prompt": "x", **extra})
        router.refusal = UnavailableError("shutting down", retry_after_s=0.2)
        down, down_headers, down_body = await client.post("/v1/completions", {"prompt": "x", **extra})
    assert (busy, busy_headers["Retry-After"], busy_body["error"]["type"]) == (429, "3", "rate_limit_error")
    assert (down, down_headers["Retry-After"], down_body["error"]["type"]) == (503, "1", "server_error")


@async_test
async def test_a_choice_that_is_refused_takes_the_others_with_it() -> None:
    """All choices of a request are submitted together; if one is refused the ones before it are aborted."""
    router = FakeRouter()
    router.refusal, router.accepts = OverloadedError("the queue is full", retry_after_s=1.0), 2
    async with serving(router) as client:
        await client.refused("/v1/completions", {"prompt": "x", "n": 4}, status=429)
    assert len(router.streams) == 2
    assert router.aborted == router.streams


@async_test
async def test_a_bug_is_a_500_that_tells_nothing() -> None:
    """An unforeseen exception: JSON, no detail, and a retry would fail again."""
    router = FakeRouter()
    router.refusal = ZeroDivisionError("secret detail")
    async with serving(router) as client:
        status, headers, body = await client.post("/v1/completions", {"prompt": "x"})
    assert (status, headers["x-should-retry"]) == (500, "false")
    assert body == {"error": {"message": "internal error", "type": "server_error", "param": None, "code": "internal_error"}}


@pytest.mark.parametrize("given", ["abc-1", None, "with space", "x" * 200])
@async_test
async def test_every_answer_has_a_request_id(given: str | None) -> None:
    """The client's if it is plain and short, else a new one; on errors too."""
    headers = {} if given is None else {"X-Request-Id": given}
    async with (
        serving(FakeRouter()) as client,
        client.http.get("/livez", headers=headers) as good,
        client.http.get("/nothing", headers=headers) as bad,
    ):
        ids = [good.headers["X-Request-Id"], bad.headers["X-Request-Id"]]
    assert (ids == [given, given]) == (given == "abc-1")
    assert all(0 < len(request_id) <= 128 for request_id in ids)


@async_test
async def test_health_means_that_a_request_would_be_served() -> None:
    """/livez always answers; /readyz and /health are 503 with the reasons while there are any."""
    reasons: list[str] = []
    async with serving(FakeRouter(), not_ready=lambda: reasons) as client:
        ready = [await client.get(path) for path in ("/livez", "/readyz", "/health")]
        reasons.append("decode-0 is loading")
        waiting = [await client.get(path) for path in ("/livez", "/readyz", "/health")]
    assert [status for status, _ in ready] == [200, 200, 200]
    assert ready[1][1] == {"status": "ok", "reasons": []}
    assert [status for status, _ in waiting] == [200, 503, 503]
    assert waiting[2][1] == {"status": "unavailable", "reasons": ["decode-0 is loading"]}


@async_test
async def test_the_served_model_is_listed() -> None:
    """One model, with its context length; names with a slash can be asked for."""
    async with serving(FakeRouter()) as client:
        _, models = await client.get("/v1/models")
        status, model = await client.get(f"/v1/models/{MODEL}")
        encoded, _ = await client.get("/v1/models/org%2Fnull")
    assert models == {"object": "list", "data": [model]}
    assert (status, encoded) == (200, 200)
    assert model == {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "disagg", "max_model_len": 256}


@async_test
async def test_operators_get_metrics_status_and_version() -> None:
    """The registry in Prometheus' text format, the status as it was given, the installed version."""
    registry = CollectorRegistry()
    Counter("disagg_things", "Things.", registry=registry).inc()
    async with serving(FakeRouter(), registry=registry) as client:
        async with client.http.get("/metrics") as response:
            text, content_type = await response.text(), response.headers["Content-Type"]
        status = await client.get("/v1/disagg/status")
        _, version = await client.get("/version")
    assert "disagg_things_total 1.0" in text
    assert content_type.startswith("text/plain; version=0.0.4")
    assert status == (200, {"run_id": "r1"})
    assert version["version"][0].isdigit()
