"""Streaming clients over plain sockets: they cost little, so that what is measured is the server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Streamed:
    """One streamed completion: seconds to the first token, and the gaps between tokens after it."""

    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # perf_counter of every event: as a rule one token
    num_tokens: int | None = None  # by the server's count, where usage was asked for
    text: str = ""
    is_complete: bool = False  # [DONE] came


def random_prompt(rng: random.Random, num_tokens: int, vocab: int = 40_000) -> list[int]:
    """Token ids that no prefix cache has seen."""
    return [rng.randrange(1000, vocab) for _ in range(num_tokens)]


async def stream(
    url: str,
    prompt: list[int],
    max_tokens: int,
    *,
    model: str,
    on_token: Callable[[int], bool] | None = None,
    keep_text: bool = False,
    **fields: object,
) -> Streamed:
    """Stream one completion to its end, or until ``on_token(count)`` says True. Raises RuntimeError for any error.

    ``keep_text`` costs the client the parsing of every event; ``fields`` go into the request.
    """
    parts = urlsplit(url)
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            **fields,
        }
    ).encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    result, started = Streamed(), time.perf_counter()
    try:
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read(2000)).decode(errors="replace"))
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                result.is_complete = result.is_complete or line.startswith(b"data: [DONE]")
                continue
            if line.startswith(b'data: {"error"'):
                raise RuntimeError(line.decode())
            if b'"choices":[],' in line:
                result.num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                continue
            if keep_text:
                result.text += json.loads(line[6:])["choices"][0]["text"]
            now = time.perf_counter()
            if not result.arrivals:
                result.ttft_s = now - started
            else:
                result.gaps_s.append(now - result.arrivals[-1])
            result.arrivals.append(now)
            if on_token is not None and on_token(len(result.arrivals)):
                break
    finally:
        writer.close()
    return result


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))] if ordered else float("nan")
