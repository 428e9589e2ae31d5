"""The composition root: builds every part, runs them in one task group, and ends them in order.

load the model's description ─▶ plan the workers ─▶ listen ─▶ start workers ─▶ first verified pair = ready
SIGHUP: read API keys and certificate again
first signal: drain (no new requests, running streams finish) ─▶ workers end ─▶ exit 0;  second signal: end now
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import os
import resource
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import uvloop
from aiohttp import web

from disagg import grammar
from disagg import log as logging_setup
from disagg.api.admin import AdminListener
from disagg.api.app import build_app
from disagg.api.connection import Runner
from disagg.api.form_checker import FormChecker
from disagg.api.services import Services
from disagg.api.tls import certificate
from disagg.config import Config, ServerConfig
from disagg.cores import host_cpus
from disagg.credentials import ApiKeys
from disagg.deployment import Deployment, free_memory, plan
from disagg.drain import admin_socket
from disagg.errors import ConfigError, StartupError
from disagg.flip import Flipper
from disagg.launcher import ProcessLauncher
from disagg.messages import Message
from disagg.metrics import Metrics, WorkerCollector
from disagg.model import find_model, forget_files, read_model_spec
from disagg.nodes import Nodes
from disagg.notify import Condition, ServiceManager
from disagg.operations import Operations
from disagg.pairs import Pairs
from disagg.request import FailReason
from disagg.router import Router
from disagg.supervisor import Role, Supervisor, WorkerInfo, WorkerState
from disagg.text.chat_template import load_chat_template
from disagg.text.tokenizer import load_tokenizer
from disagg.text.tools import tool_support
from disagg.vllm_metrics import VllmCollector

if TYPE_CHECKING:
    from disagg.tracing import Tracing

log = structlog.get_logger(__name__)

_KEEPALIVE_TIMEOUT_S = 120.0  # longer than the pools of common clients and proxies keep an idle connection (up to 90 s)
_NO_PATH = "no KV path between workers is verified yet"
_LAG_EVERY_S = 0.05
_ENDING_S = 2.0  # after the last stream has ended, for its last bytes to leave


def run(config: Config, launcher: ProcessLauncher) -> int:
    """Serve until a signal. Returns the exit code; raises ConfigError or StartupError when it cannot begin or go on."""
    logging_setup.configure(config.log)
    try:
        uvloop.run(Server(config, launcher).serve())
    except BaseExceptionGroup as group:
        failures, others = group.split(StartupError)
        if failures is None or others is not None:
            raise
        raise next(error for error in _leaves(failures)) from None
    return 0


class Server:
    """All parts of one server, and what they tell each other."""

    def __init__(self, config: Config, launcher: ProcessLauncher) -> None:
        """Reads the model's description and plans the workers; starts nothing. Raises ConfigError or StartupError."""
        self.config = config
        self.run_id = secrets.token_hex(4)
        self.started = time.monotonic() - _process_age_s()
        self.keys = ApiKeys(config.server.api_key_file, os.environ)
        _refuse_exposure(config.server, has_keys=bool(self.keys))
        self.certificate = certificate(config.server.tls_cert, config.server.tls_key)
        files = find_model(config.model.path)
        spec = read_model_spec(files)
        self.model_name = config.model.name or files.name
        self.tokenizer = load_tokenizer(files)
        self.chat_template = load_chat_template(files, self.tokenizer)
        template = None if self.chat_template is None else self.chat_template.source
        self.tools = tool_support(config.model.tool_parser, template, self.tokenizer)
        self.forms = FormChecker(config.model.path) if grammar.is_installed() else None
        forget_files()
        self.vocab_size = min(spec.vocab_size, self.tokenizer.vocab_size)
        self.deployment: Deployment = plan(
            config,
            files,
            spec,
            vocab_size=self.vocab_size,
            run_id=self.run_id,
            cpus=host_cpus(),
            free_nbytes=free_memory(),
            is_part=bool(config.cluster.listen),
        )
        self.tracing = _tracing(config.tracing.otlp_endpoint, self.model_name, self.run_id)
        mint = itertools.count(1)
        self.metrics = Metrics()
        self.supervisor = Supervisor(self.deployment.workers, config.workers, launcher, observer=self)
        self.workers = self.supervisor.workers
        self.nodes: Nodes | None = None
        if config.cluster.listen:
            self.nodes = Nodes(config, self.deployment, self.supervisor, model_name=self.model_name, run_id=self.run_id)
        by_address = config.handoff.transport == "ucx"
        self.pairs = Pairs(self.workers, mint, on_verified=self._on_verified, by_address=by_address)
        self.router = Router(
            self.workers,
            self.pairs,
            config.scheduler,
            mint,
            time.monotonic,
            self.metrics,
            fallback=config.workers.fallback,
            stuck_s=config.workers.stuck_s,
        )
        self.metrics.registry.register(WorkerCollector(self.workers, self.router))
        if config.metrics.compat == "vllm":
            self.metrics.registry.register(VllmCollector(self.metrics, self.workers, self.router, self.model_name))
        self._manager = ServiceManager(os.environ)
        self._ready = asyncio.Event()
        self._operations = Operations(self.router, time.monotonic, on_resumed=self._look_if_ready)
        self._flipper = Flipper(self.router, self.pairs, self.supervisor, start_s=config.workers.start_s)
        self._first_signal = asyncio.Event()
        self._second_signal = asyncio.Event()

    async def serve(self) -> None:
        """Until the first signal and the drain after it, or until a worker cannot be kept alive (StartupError)."""
        _raise_file_limit()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        if self._manager.is_there or self.certificate is not None or self.keys.is_file:
            loop.add_signal_handler(signal.SIGHUP, self._reload)  # else it ends a server whose terminal has gone
        services = self._services()
        runner, url = await self._listen(services)
        admin: AdminListener | None = None
        try:
            admin = await self._listen_to_admin(services, int(url.rpartition(":")[2]))
            async with asyncio.TaskGroup() as tasks:
                telling = tasks.create_task(self._manager.keep_told(self._condition), name="service manager")
                keeping = tasks.create_task(self.supervisor.run(), name="supervisor")
                lagging = tasks.create_task(self._watch_loop(), name="loop lag")
                if self.nodes is not None:
                    await self.nodes.listen()
                announcing = tasks.create_task(self._announce(url), name="announce")
                await self._first_signal.wait()
                announcing.cancel()
                if self.nodes is not None:
                    self.nodes.admit_no_more()
                await self._drain()
                await runner.cleanup()
                await self.supervisor.aclose()
                keeping.cancel()
                telling.cancel()
                lagging.cancel()
        finally:
            if self.nodes is not None:
                self.nodes.admit_no_more()
            self.router.fail_all("the server has stopped", FailReason.SHUTDOWN)
            await runner.cleanup()
            await self.supervisor.aclose()
            if self.nodes is not None:
                await self.nodes.aclose()
            if admin is not None:
                await admin.aclose()
            if self.forms is not None:
                await self.forms.aclose()
            if self.tracing is not None:
                await self.tracing.aclose()
            self._manager.close()

    # ---------------------------------------------------------------- what the supervisor tells

    def on_ready(self, worker: WorkerInfo) -> None:
        self.router.on_ready(worker)
        self._look_if_ready()

    def on_message(self, worker: WorkerInfo, message: Message) -> None:
        self.router.on_message(worker, message)

    def on_down(self, worker: WorkerInfo) -> None:
        self.router.on_down(worker)

    # ---------------------------------------------------------------- what the api asks

    def not_ready(self) -> list[str]:
        """Why requests should go elsewhere; empty when every worker serves and a KV path is verified."""
        reasons = ["draining"] if self.router.is_draining else []
        for worker in self.workers:
            if (worker.node or worker.next or worker.state is WorkerState.GONE) and self.router.can_serve():
                continue  # its node comes and goes, it is being flipped, or given up; others do its work, and the status says so
            if not worker.is_ready:
                reasons.append(f"{worker.id} is {worker.state}" + (f": {worker.cause}" if worker.cause else ""))
            elif quiet_s := self._quiet_s(worker):
                reasons.append(f"{worker.id} has made no progress for {quiet_s:.1f} s")
        if not self.router.can_serve() and not reasons:
            is_waiting = self.nodes is not None and {Role.PREFILL, Role.DECODE} - {worker.role for worker in self.workers}
            reasons.append(f"no node has joined as {' and '.join(sorted(is_waiting))} yet" if is_waiting else _NO_PATH)
        return reasons

    def status(self) -> dict[str, Any]:
        now = asyncio.get_running_loop().time()
        return {
            "run_id": self.run_id,
            "mode": self.deployment.mode,
            "model": self.model_name,
            "max_model_len": self.deployment.max_model_len,
            "uptime_s": round(time.monotonic() - self.started, 1),
            "draining": self.router.is_draining,
            "degraded": self.router.is_degraded,
            "workers": [_worker_status(worker, now) for worker in self.workers],
            "nodes": self.nodes.status() if self.nodes is not None else [],
            "pairs": self.pairs.status(),
            "requests": self.router.counts(),
        }

    # ---------------------------------------------------------------- what the service manager is told

    def _condition(self) -> Condition:
        stuck = [worker.id for worker in self.workers if self._quiet_s(worker)]
        is_ending, is_ready = self._first_signal.is_set(), self._ready.is_set()
        num_running = sum(self.router.counts().values())
        if is_ending:
            text = f"Draining, {num_running} running"
        elif not is_ready:
            text = "Starting: " + "; ".join(self.not_ready())
        elif reasons := self.not_ready():
            text = "Not ready: " + "; ".join(reasons)
        else:
            text = f"Serving {self.model_name}{' (degraded)' if self.router.is_degraded else ''}"
        return Condition(text, is_progressing=not stuck, is_passing=is_ending or not is_ready)

    def _quiet_s(self, worker: WorkerInfo) -> float:
        """For how long a worker that should serve has said nothing, if that is too long; else 0."""
        silent_s = asyncio.get_running_loop().time() - worker.heard_at
        return silent_s if worker.is_ready and silent_s > self.config.workers.stuck_s / 2 else 0.0

    # ---------------------------------------------------------------- start and end

    def _services(self) -> Services:
        return Services(
            router=self.router,
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            model_name=self.model_name,
            max_model_len=self.deployment.max_model_len,
            vocab_size=self.vocab_size,
            created=int(time.time()),
            config=self.config.server,
            registry=self.metrics.registry,
            status=self.status,
            not_ready=self.not_ready,
            metrics=self.metrics,
            forms=self.forms,
            tools=self.tools,
            tracing=self.tracing,
            keys=self.keys,
        )

    async def _listen(self, services: Services) -> tuple[web.AppRunner, str]:
        """Accept connections already now: /livez answers and /readyz tells what is still loading. Raises StartupError."""
        config = self.config.server
        runner = Runner(build_app(services), keepalive_timeout=_KEEPALIVE_TIMEOUT_S, shutdown_timeout=_ENDING_S)
        await runner.setup()
        try:
            tls = self.certificate.context if self.certificate is not None else None
            site = web.TCPSite(runner, config.host, config.port, backlog=1024, ssl_context=tls)
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise StartupError(f"cannot listen on {config.host} port {config.port}: {error.strerror or error}") from error
        address = runner.addresses[0]
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        return runner, f"{'https' if self.certificate is not None else 'http'}://{host}:{address[1]}"

    async def _listen_to_admin(self, services: Services, port: int) -> AdminListener | None:
        """Raises StartupError when the operator has named a socket that cannot be had; one of our own choice is let go."""
        setting = self.config.server.admin_socket
        path = admin_socket(setting, port, os.environ)
        if not path:
            return None
        listener = AdminListener(path, services, self._operations, self._flipper)
        try:
            await listener.listen()
        except StartupError as error:
            if setting != "auto":
                raise
            log.warning("no admin socket", reason=str(error))
            return None
        log.info("admin socket", path=path)
        return listener

    async def _announce(self, url: str) -> None:
        """Say once, on standard output, that requests can come."""
        await self._ready.wait()
        workers = ", ".join(f"{worker.id} ({worker.settings.device})" for worker in self.workers)
        paths = ", ".join(
            f"{pair.prefill.id} → {pair.decode.id} over {pair.transport} at {pair.gb_per_s:.1f} GB/s" for pair in self.pairs
        )
        took_s = time.monotonic() - self.started
        self._manager.ready(self._condition().text)
        log.info("ready", url=url, model=self.model_name, mode=self.deployment.mode, took_s=round(took_s, 1))
        line = f"Ready after {took_s:.1f} s: {url}  {self.model_name}, {self.deployment.mode}: {workers}"
        try:
            sys.stdout.write(line + (f"; {paths}" if paths else "") + "\n")
            sys.stdout.flush()
        except OSError as error:  # nobody reads it; the log has said the same
            log.debug("ready line not written", reason=str(error))
        if self.forms is not None:  # not before: its process would load on the workers' cores
            with contextlib.suppress(ConnectionError):  # the first form tries again, and tells what is in the way
                await self.forms.start()

    async def _watch_loop(self) -> None:
        """While the workers keep the cores busy, this process must still run at once."""
        while True:
            due = time.monotonic() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self.metrics.observe_loop_lag(max(0.0, time.monotonic() - due))

    def _on_verified(self) -> None:
        self.router.on_change()
        self._look_if_ready()

    def _look_if_ready(self) -> None:
        if self.pairs.are_verified and not self.not_ready():
            self._ready.set()

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if not self._first_signal.is_set():
            self._operations.is_ending = True
            self._manager.stopping(f"Draining after {name}")
            log.info("draining", signal=name, limit_s=self.config.server.drain_s, streams=self.router.counts())
            self._first_signal.set()
        else:
            log.warning("ending now", signal=name)
            self._second_signal.set()

    def _reload(self) -> None:
        """What can change without a restart; a file that cannot be used changes nothing."""
        is_ready = self._ready.is_set()
        if is_ready:
            self._manager.reloading()
        for secret in (self.keys, self.certificate):
            try:
                if secret is not None:
                    secret.load()
            except ConfigError as error:
                log.error("not reloaded", reason=str(error))
        log.info("reloaded", keys=repr(self.keys))
        if is_ready:
            self._manager.ready(self._condition().text)

    async def _drain(self) -> None:
        """Until every stream has ended, ``drain_s`` is over or a second signal comes; then the rest ends with an error."""
        draining = asyncio.ensure_future(self.router.drain())
        forced = asyncio.ensure_future(self._second_signal.wait())
        await asyncio.wait({draining, forced}, timeout=self.config.server.drain_s, return_when=asyncio.FIRST_COMPLETED)
        is_complete = draining.done()
        for task in (draining, forced):
            task.cancel()
        if not is_complete:
            self.router.fail_all("the server is shutting down", FailReason.SHUTDOWN)


def _worker_status(worker: WorkerInfo, now: float) -> dict[str, Any]:
    stats, ready = worker.stats, worker.ready
    return {
        "id": worker.id,
        "role": worker.role,
        "next_role": worker.next.role if worker.next is not None else None,
        "node": worker.node,
        "pid": (worker.handle.pid or None) if worker.handle is not None else None,  # one of a node is not known at once
        "epoch": worker.epoch,
        "state": worker.state,
        "cause": worker.cause,
        "device": worker.settings.device,
        "cpus": worker.settings.cpus,
        "lent_cpus": worker.settings.lent_cpus,
        "restarts": worker.restarts,
        "heartbeat_age_s": round(now - worker.heard_at, 2),
        "requests": {"waiting": stats.waiting if stats else 0, "running": stats.running if stats else 0},
        "blocks": {
            "total": ready.num_blocks if ready else 0,
            "free": stats.free if stats else 0,
            "reserved": stats.reserved if stats else 0,
            "filling": stats.filling if stats else 0,
            "in_use": stats.in_use if stats else 0,
            "cached": stats.cached if stats else 0,
        },
        "decode_prefill_tokens": stats.decode_prefill_tokens if stats else 0,
        "preemptions": stats.preemptions if stats else 0,
        "steps": stats.steps if stats else 0,
    }


def _tracing(endpoint: str, model_name: str, run_id: str) -> Tracing | None:
    """None: no spans are wanted. Raises ConfigError when what they need is not installed."""
    if not endpoint:
        return None
    try:
        from disagg.tracing import Tracing
    except ImportError as error:
        raise ConfigError(f"tracing.otlp_endpoint: {error.name} is not installed; pip install 'disagg[otel]'") from error
    return Tracing(endpoint, model_name, run_id, time.monotonic)


def _refuse_exposure(config: ServerConfig, *, has_keys: bool) -> None:
    """Raises ConfigError for a server that anybody on the network could use, unless that is meant."""
    if not (has_keys or config.insecure or _is_loopback(config.host)):
        raise ConfigError(
            f"server.host = {config.host!r}: everybody who can reach it could use it. Name a file with API keys "
            "(--api-key-file), listen on 127.0.0.1, or say --insecure if that is meant"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _process_age_s() -> float:
    """Since the command was given: imports take a good part of the time until the server is ready."""
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _raise_file_limit() -> None:
    """A stream is a descriptor: use what the host allows rather than the shell's default of 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
