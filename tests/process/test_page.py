"""The page at / in a real browser: it shows what the server does, chats by keyboard, and breaks no rule of its own policy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.process.browser import CHROMIUM, Tab, tab
from tests.process.harness import null_server

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium on the PATH (Debian's package chromium)")

SLOWER = 8  # a small laptop, which still has to keep its keys answered while thousands of tokens a second arrive
KEY = "0123456789abcdef0123456789abcdef"


async def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """A key is asked for; figures appear; an answer streams in by keyboard alone, and stops by it; nobody runs what was typed."""
    keys = tmp_path / "keys"
    keys.write_text(f"me:{KEY}\n")
    keys.chmod(0o600)
    with null_server("--api-key-file", str(keys)) as server:
        server.headers["Authorization"] = f"Bearer {KEY}"
        async with tab(tmp_path / "profile") as page:
            await page.open(server.url + "/")
            await _give_the_key(page)
            await page.until("document.getElementById('state').textContent === 'ready'")
            await _chat(page)
            await page.until("document.querySelector('.value').textContent !== '–/s'")
            await page.until("[...document.querySelectorAll('.plot path.a')].some(path => path.getAttribute('d').includes('L'))")
            refused = [text for text in page.complaints if "401" in text]
            assert page.complaints == refused, "the page broke its policy, or broke"
            await asyncio.to_thread(server.wait_until_empty, 5.0)


async def _give_the_key(page: Tab) -> None:
    """The page itself is open; its figures are not, until a key is typed in, which stays in the tab."""
    await page.until("document.activeElement.id === 'key'")
    assert await page.evaluate("document.querySelectorAll('#workers li').length") == 0
    await page.type(KEY)
    await page.press("Enter", "\r")
    await page.until("document.querySelectorAll('#workers li').length === 2")
    assert await page.evaluate("document.getElementById('key-form').hidden")
    assert KEY not in await page.evaluate("document.documentElement.outerHTML")


async def _chat(page: Tab) -> None:
    await page.evaluate("document.getElementById('text').focus()")
    await page.type("<img src=x onerror=alert(1)>")
    await page.call("Emulation.setCPUThrottlingRate", rate=SLOWER)
    await page.press("Enter", "\r")
    await page.until("(document.querySelector('#log .assistant') || {textContent: ''}).textContent.length > 20")
    assert await page.evaluate("document.querySelector('#log .user').textContent") == "<img src=x onerror=alert(1)>"
    assert await page.evaluate("document.querySelectorAll('#log img').length") == 0
    assert await page.evaluate("document.getElementById('send').disabled")
    await page.press("Escape")
    await page.until("!document.getElementById('send').disabled")
    assert await page.evaluate("document.activeElement.id") == "text"
    await page.call("Emulation.setCPUThrottlingRate", rate=1)
