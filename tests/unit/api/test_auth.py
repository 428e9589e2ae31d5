"""Who may ask, from which pages, and how much: keys, CORS and limits on the whole surface."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from disagg.api.app import build_app
from disagg.api.limits import Limits
from disagg.config import ServerConfig
from disagg.credentials import ApiKeys
from disagg.errors import ConfigError, OverloadedError
from tests.unit.api.fakes import Client, FakeRouter, async_test, make_services, says, serving, until

ALICE, BOB = "alice-0123456789abcdef", "bob-fedcba9876543210"
OPEN = {"/livez", "/readyz", "/health", "/"}
PAGE = "https://chat.example"


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    path = tmp_path / "keys"
    path.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    path.chmod(0o600)
    return ApiKeys(str(path), {})


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def sent(client: Client, method: str, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    async with client.http.request(method, path, headers=headers) as response:
        await response.read()
        return response.status, dict(response.headers)


@async_test
async def test_every_route_but_the_health_checks_needs_a_key(keys: ApiKeys) -> None:
    """Routes that exist and routes that do not: a stranger gets the bare page and learns whether the server is well."""
    async with serving(FakeRouter(), keys=keys) as client:
        routes = [
            (route.method, route.resource.canonical.replace("{id}", "x"))
            for route in build_app(make_services(FakeRouter())).router.routes()
            if route.method != "HEAD"
        ]
        assert len(routes) > 8
        for method, path in [*routes, ("GET", "/nothing"), ("POST", "/livez/x")]:
            status, headers = await sent(client, method, path)
            assert (status == 401) == (path not in OPEN), (method, path, status)
            assert (headers.get("WWW-Authenticate", "").startswith("Bearer")) == (status == 401)


@async_test
async def test_a_refusal_has_openais_envelope(keys: ApiKeys) -> None:
    """401, invalid_api_key, JSON, a request id; the given key is nowhere in it; it is counted by its route."""
    async with serving(FakeRouter(says("x")), keys=keys) as client:
        for headers in (
            {},
            bearer("wrong-0123456789abc"),
            {"X-Api-Key": "wrong-0123456789abc"},
            {"Authorization": f"Basic {ALICE}"},
        ):
            status, answered, body = await client.post("/v1/completions", {"prompt": "x"}, **headers)
            assert (status, body["error"]["code"], body["error"]["type"]) == (401, "invalid_api_key", "invalid_request_error")
            assert answered["X-Request-Id"]
            assert "0123456789" not in str(body)
    assert client.metrics.requests == [("/v1/completions", 401)] * 4


@async_test
async def test_a_key_may_come_in_either_header_and_its_name_is_kept(keys: ApiKeys) -> None:
    """Bearer (in any case) and X-Api-Key. The request's stream has the name for the log, and metrics count by it."""
    router = FakeRouter(says("x"))
    async with serving(router, keys=keys) as client:
        for headers in (bearer(ALICE), {"Authorization": f"bearer  {ALICE}"}, {"X-Api-Key": BOB}):
            status, _, _ = await client.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, **headers)
            assert status == 200
        async with client.http.get("/metrics", headers=bearer(BOB)) as response:
            metrics = await response.text()
    assert [stream.key_name for stream in router.streams] == ["alice", "alice", "bob"]
    assert 'disagg_key_requests_total{key="alice"} 2.0' in metrics
    assert 'disagg_key_requests_total{key="bob"} 2.0' in metrics
    assert ALICE not in metrics


@async_test
async def test_without_keys_nobody_is_asked() -> None:
    """What listens on loopback needs no set-up; a key that is sent all the same is ignored."""
    async with serving(FakeRouter(says("x"))) as client:
        assert (await client.get("/v1/models"))[0] == 200
        assert (await sent(client, "GET", "/v1/models", **bearer("none")))[0] == 200


# ------------------------------------------------------------------------------------------------ pages of other origins


@async_test
async def test_no_page_of_another_origin_may_ask_unless_it_is_named() -> None:
    """Off by default: no header, and a preflight is a 405 as any unknown method."""
    async with serving(FakeRouter()) as client:
        status, headers = await sent(client, "OPTIONS", "/v1/models", Origin=PAGE, **{"Access-Control-Request-Method": "GET"})
        assert status == 405
        assert not any(name.startswith("Access-Control") for name in headers)
        assert not any(name.startswith("Access-Control") for name in (await sent(client, "GET", "/livez", Origin=PAGE))[1])


@async_test
async def test_a_preflight_needs_no_key_and_a_refusal_can_be_read(keys: ApiKeys) -> None:
    """The named page gets its headers on the preflight, on answers, on streams, and on the 401, and no other page does."""
    config = ServerConfig(cors_origins=f"{PAGE}, http://localhost:3000")
    async with serving(FakeRouter(says("x")), keys=keys, config=config) as client:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}
        status, headers = await sent(client, "OPTIONS", "/v1/chat/completions", Origin=PAGE, **asked)
        assert (status, headers["Access-Control-Allow-Origin"]) == (204, PAGE)
        assert headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
        assert "POST" in headers["Access-Control-Allow-Methods"]
        status, headers = await sent(client, "GET", "/v1/models", Origin=PAGE)
        assert (status, headers["Access-Control-Allow-Origin"], headers["Vary"]) == (401, PAGE, "Origin")
        body = {"prompt": "x", "stream": True}
        async with client.http.post("/v1/completions", json=body, headers={"Origin": PAGE, **bearer(ALICE)}) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (200, PAGE)
            assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
            await response.read()
        for status_of_other, (method, extra) in {405: ("OPTIONS", asked), 401: ("GET", {})}.items():
            status, headers = await sent(client, method, "/v1/models", Origin="https://evil.example", **extra)
            assert status == status_of_other
            assert "Access-Control-Allow-Origin" not in headers


@async_test
async def test_a_star_is_every_page() -> None:
    """``*`` is answered as such, so that caches may keep it."""
    async with serving(FakeRouter(), config=ServerConfig(cors_origins="*")) as client:
        assert (await sent(client, "GET", "/livez", Origin=PAGE))[1]["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize("text", ["chat.example", "https://chat.example/", "ftp://x", "https://a.example https://b.example/x"])
def test_what_is_no_origin_is_refused(text: str) -> None:
    """A path or a bare host would never match what a browser sends."""
    with pytest.raises(ConfigError, match=r"server\.cors_origins"):
        build_app(make_services(FakeRouter(), config=ServerConfig(cors_origins=text)))


# ------------------------------------------------------------------------------------------------ limits


def test_requests_per_minute_are_a_bucket_that_fills_evenly() -> None:
    """A minute's worth at once, then one each 60 / n seconds; the refusal says when; keys do not share."""
    limits = Limits(max_streams=0, requests_per_minute=6)

    def ask(key: str, now: float) -> None:
        with limits.admitted(key, now):
            pass

    for _ in range(6):
        ask("alice", 100.0)
    with pytest.raises(OverloadedError) as caught:
        ask("alice", 104.0)
    assert caught.value.retry_after_s == pytest.approx(6.0)
    ask("bob", 104.0)
    ask("alice", 110.1)
    with pytest.raises(OverloadedError):
        ask("alice", 110.2)
    for _ in range(6):
        ask("alice", 10_000.0)
    with pytest.raises(OverloadedError):
        ask("alice", 10_000.0)


@async_test
async def test_streams_per_key_are_counted_until_they_end(keys: ApiKeys) -> None:
    """The third of a key is a 429 with Retry-After, that of another key is not; one that ends, or is left, makes room."""
    router = FakeRouter()
    body = {"prompt": "x", "stream": True}
    limited = ServerConfig(max_streams_per_key=2, keepalive_s=60.0)
    async with serving(router, keys=keys, config=limited) as client, asyncio.TaskGroup() as group:
        running = [group.create_task(client.post("/v1/completions", {"prompt": "x"}, **bearer(ALICE))) for _ in range(2)]
        await until(lambda: len(router.streams) == 2)
        status, headers, answer = await client.post("/v1/completions", body, **bearer(ALICE))
        assert (status, headers["Retry-After"], answer["error"]["type"]) == (429, "1", "rate_limit_error")
        assert (await sent(client, "GET", "/v1/models", **bearer(ALICE)))[0] == 200
        running[0].cancel()
        await until(lambda: router.streams[0].is_final)
        router.script = says("x")
        for key in (ALICE, BOB):
            assert (await client.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, **bearer(key)))[0] == 200
        router.streams[1].abort("enough")
    assert running[1].result()[0] == 500
