"""vLLM's disaggregated mode on one host: a prefill and a decode instance, and the proxy before them, which vLLM does not ship.

    python bench/vllm_pd.py --vllm ENV/bin/vllm --model FOLDER [--port 8120]

A request goes to prefill with one token to make; the answer names the KV blocks that decode then fetches over NIXL. Two things
are set right that would halve its speed: each instance has a core of its own, and keeps it (vLLM's processes would pin
themselves to the same one), and threads do not spin (for that, the NIXL package must be repaired: see peers.toml).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

ROLES = ("kv_producer", "kv_consumer")  # vLLM's names of prefill and decode
STAY = "import os\nos.sched_setaffinity = lambda pid, cpus: None\n"  # as sitecustomize.py: run first by every Python process

URLS = web.AppKey("urls", list[str])
SESSION = web.AppKey("session", aiohttp.ClientSession)
ARGUMENTS = web.AppKey("arguments", argparse.Namespace)


def instance(args: argparse.Namespace, index: int) -> subprocess.Popen[bytes]:
    """vLLM in role ``index`` on core ``index``, listening ``index`` + 1 above the proxy's port."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": ROLES[index], "kv_buffer_device": "cpu"}
    command = ["taskset", "--cpu-list", str(index), args.vllm, "serve", args.model, "--port", str(args.port + 1 + index)]
    command += ["--dtype", args.dtype, "--max-model-len", "8192", "--no-enable-prefix-caching"]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": str(index),
        "OMP_NUM_THREADS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(args.port + 3 + index),
        "PYTHONPATH": args.site,
    }
    return subprocess.Popen([*command, "--kv-transfer-config", json.dumps(transfer)], env={**os.environ, **environment})


async def both_instances(app: web.Application) -> AsyncIterator[None]:
    """Run them as long as the proxy."""
    processes = [instance(app[ARGUMENTS], index) for index in range(len(ROLES))]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        app[SESSION] = session
        yield
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


async def prefill(app: web.Application, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    """Compute the prompt; → what decode needs to fetch its KV. Raises ClientResponseError."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    nobody_yet = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {**wanted, **nobody_yet}}
    first.pop("stream_options", None)
    async with app[SESSION].post(app[URLS][0] + path, json=first, headers=headers, raise_for_status=True) as answer:
        parameters: dict[str, Any] = (await answer.json())["kv_transfer_params"]
        return parameters


async def complete(request: web.Request) -> web.StreamResponse:
    body, headers = await request.json(), {"X-Request-Id": uuid.uuid4().hex}
    try:
        parameters = await prefill(request.app, request.path, body, headers)
    except aiohttp.ClientError as error:
        raise web.HTTPBadGateway(text=str(error)) from error
    body["kv_transfer_params"] = parameters
    async with request.app[SESSION].post(request.app[URLS][1] + request.path, json=body, headers=headers) as answer:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the client has left; leaving, too, tells decode
            async for data in answer.content.iter_any():
                await response.write(data)
        return response


async def models(request: web.Request) -> web.Response:
    async with request.app[SESSION].get(request.app[URLS][1] + "/v1/models") as answer:
        return web.json_response(await answer.json())


def serve(args: argparse.Namespace) -> None:
    app = web.Application(client_max_size=64 << 20)
    app[ARGUMENTS], app[URLS] = args, [f"http://127.0.0.1:{args.port + 1 + index}" for index in range(len(ROLES))]
    app.cleanup_ctx.append(both_instances)
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    web.run_app(app, host="127.0.0.1", port=args.port, print=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, help="vLLM's command")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--port", type=int, default=8120, help="the proxy's; the four above it are used as well")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as args.site:
        Path(args.site, "sitecustomize.py").write_text(STAY)
        serve(args)


if __name__ == "__main__":
    main()
