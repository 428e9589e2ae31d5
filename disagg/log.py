"""Logging: one JSON object or one console line per event, on stderr, from the parent and from every worker.

Modules write ``log = structlog.get_logger(__name__)`` and log events with fields, never sentences built from values. Records of
the standard library's loggers (aiohttp, asyncio, warnings) take the same way out. Tracebacks are printed without local
variables: prompts and texts are in them, and no prompt or text is ever logged.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from disagg.config import LogConfig


def configure(config: LogConfig, **bound: Any) -> None:
    """Send all logging of this process to stderr as ``config`` says; ``bound`` fields (``worker="prefill-0"``) go on each line.

    Call it once at the start of a process; calling it again replaces the settings.
    """

    def add_bound(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {**bound, **event}

    processors: list[Processor] = [
        add_bound,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
    ]
    if _is_json(config):
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_dumps)]
    else:
        processors += [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=processors))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    logging.captureWarnings(True)
    structlog.configure(
        processors=[structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(config.level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def _is_json(config: LogConfig) -> bool:
    return config.format == "json" or (config.format == "auto" and not sys.stderr.isatty())


def _dumps(event: EventDict, **options: Any) -> str:
    return orjson.dumps(event, **options).decode()
