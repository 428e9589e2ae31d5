"""The page at /: served to everybody, allowed to run its own script only, small, and never writing markup."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from disagg.api import page
from tests.unit.api.fakes import FakeRouter, async_test, serving

MOST_BYTES = 25 * 1024


@async_test
async def test_the_page_may_run_what_is_in_it_and_nothing_else() -> None:
    """The policy names the digests of the style and the script as they are sent, and this server as the only one to talk to."""
    async with serving(FakeRouter()) as client, client.http.get("/") as response:
        text = await response.text()
        policy = response.headers["Content-Security-Policy"]
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == directives["base-uri"] == directives["frame-ancestors"] == "'none'"
    assert directives["connect-src"] == "'self'"
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert directives[directive] == f"'sha256-{digest}'"


@async_test
async def test_the_page_is_small_and_asks_nobody_else() -> None:
    """No other host, no inline handlers or styles, which the policy would stop."""
    async with serving(FakeRouter()) as client, client.http.get("/") as response:
        text = await response.text()
    assert len(text.encode()) <= MOST_BYTES
    assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}  # the name of SVG
    assert not re.search(r"<[^>]+ (on\w+|style)=", text)


def test_the_script_writes_text_never_markup() -> None:
    """What models and users say is put in as text."""
    script = (files(page) / "page.js").read_text(encoding="utf-8")
    assert "textContent" in script
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)
