"""A headless Chromium, driven over its DevTools protocol, as far as a test of one page needs it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START_S = 60.0
DEADLINE_S = 30.0
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")


class Tab:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._num_sent = 0
        self.complaints: list[str] = []  # errors, exceptions and violations of the page's policy

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_sent += 1
        await self._socket.send_json({"id": self._num_sent, "method": method, "params": params})
        while True:
            message = json.loads((await self._socket.receive(DEADLINE_S)).data)
            if message.get("id") == self._num_sent:
                assert "error" not in message, message
                return message["result"]
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.complaints.append(message["params"]["entry"]["text"])
            if message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))

    async def evaluate(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait for a condition of the page."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                while not await self.evaluate(expression):  # noqa: ASYNC110 - another process's page has no event for it
                    await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                raise AssertionError(f"never: {expression}; {self.complaints}") from None

    async def open(self, url: str, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    async def press(self, key: str, text: str = "") -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            pressed = {"text": text} if text and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **pressed)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def screenshot(self) -> bytes:
        """PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])


@asynccontextmanager
async def tab(profile: Path) -> AsyncIterator[Tab]:
    """One tab of a browser of its own, whose files go to ``profile``."""
    assert CHROMIUM is not None
    environment = {**os.environ, "HOME": str(profile)}
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        async with asyncio.timeout(START_S):
            while b"DevTools listening on " not in (line := await process.stderr.readline()):
                assert line, f"the browser has ended: {await process.wait()}"
        draining = asyncio.create_task(process.stderr.read())
        host = line.decode().split("ws://", 1)[1].split("/", 1)[0]
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://{host}/json/list") as answer:
                (page,) = [each for each in await answer.json(content_type=None) if each["type"] == "page"]
            async with http.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=64 << 20) as socket:
                opened = Tab(socket)
                yield opened
                await opened.call("Browser.close")
        async with asyncio.timeout(DEADLINE_S):
            await process.wait()
        await draining
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
