"""GET /docs: the description of ``/openapi.json`` as one page to read, without scripts and without a network."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Iterator
from html import escape
from typing import Any

from aiohttp import web

from disagg.api.openapi import document

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1, h2 { line-height: 1.2 }
h2 { margin: 2.2rem 0 .2rem; font-size: 1.1rem }
code, h2 { font-family: ui-monospace, monospace }
table { border-collapse: collapse; width: 100%; margin: .6rem 0 }
th, td { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid #8884 }
td:first-child { white-space: nowrap }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


async def docs(http: web.Request) -> web.Response:
    return web.Response(text=page(), content_type="text/html", headers=_HEADERS)


@functools.cache
def page() -> str:
    described = document()
    paths = described["paths"].items()
    operations = [line for path, methods in paths for method, each in methods.items() for line in _lines(method, path, each)]
    types = [line for name, schema in described["components"]["schemas"].items() for line in _type_lines(name, schema)]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
            f"<title>disagg {escape(described['info']['version'])}: HTTP API</title>",
            f"<style>{_STYLE}</style>",
            f"<h1>disagg {escape(described['info']['version'])}</h1>",
            f"<p>{escape(described['info']['description'])} For programs: <a href=openapi.json>openapi.json</a></p>",
            *operations,
            "<h1>Types</h1>",
            *types,
            "</html>",
        ]
    )


def _lines(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<h2>{method.upper()} {escape(path)}</h2>"
    yield f"<p>{escape(operation['summary'])}"
    if "requestBody" in operation:
        yield f"<br>Body: {_contents(operation['requestBody']['content'])}"
    yield "</p><table>"
    for code, response in operation["responses"].items():
        yield f"<tr><td>{code}<td>{escape(response['description'])}<td>{_contents(response['content'])}"
    yield "</table>"


def _contents(content: dict[str, Any]) -> str:
    """The types that ``content`` can be of, or media types where it is not JSON of ours."""
    return ", ".join(
        _kind(media["schema"]) if "$ref" in media.get("schema", {}) else escape(name) for name, media in content.items()
    )


def _type_lines(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f'<h2 id="{escape(name)}">{escape(name)}</h2>'
    yield f"<p>{escape(schema.get('description', ''))}</p><table>"
    for field, kind in schema.get("properties", {}).items():
        need = "required" if field in schema.get("required", ()) else ""
        yield f"<tr><td><code>{escape(field)}</code><td>{_kind(kind)}<td>{need}"
    yield "</table>"


def _kind(schema: dict[str, Any]) -> str:
    """One field's type and limits in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_kind(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    words = str(schema.get("type", "anything"))
    if "items" in schema:
        words = f"list of {_kind(schema['items'])}"
    elif isinstance(schema.get("additionalProperties"), dict):
        words = f"object of {_kind(schema['additionalProperties'])}"
    limits = [f"{sign} {schema[key]}" for key, sign in _LIMITS.items() if key in schema]
    return f"{words} ({escape(', '.join(limits))})" if limits else words


_LIMITS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
    "minItems": "at least",
    "maxItems": "at most",
}
