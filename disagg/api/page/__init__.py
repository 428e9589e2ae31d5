"""GET /: what the server is doing, live, and a chat with its model. One document, made once from the files beside this one.

It has no key of its own, so it is served to everybody; what it shows it asks for like any other client, with the key that its
reader types in. The browser is told to run this script and this style and nothing else, and to talk to this server only.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib.resources import files

from aiohttp import web


async def page(http: web.Request) -> web.Response:
    body, headers = _document()
    return web.Response(body=body, headers=headers)


@functools.cache
def _document() -> tuple[bytes, dict[str, str]]:
    """The page with its style and script inside, and the headers that allow these two by their digests."""
    html, style, script = ((files(__name__) / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"style-src {_source(style)}; script-src {_source(script)}; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return html.replace("/* style */", style).replace("/* script */", script).encode(), headers


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
