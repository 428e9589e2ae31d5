"""The fields that give an answer its form: ``response_format``, ``structured_outputs`` and the older ``guided_*``.

A form is a grammar and the field that asked for it. Before its request is submitted it is tried out in a process that may die
of it, so that whatever is wrong with it is a 400 that names the field; the workers compile what has passed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from disagg import grammar
from disagg.api.types import ResponseFormat, SharedFields, StructuredOutputs
from disagg.errors import GrammarError, InvalidRequestError, OverloadedError

CHECK_S = 5.0  # to try one form: far above what its process allows itself, for a host where it hardly gets to run
_WAIT_S = 15.0
MAX_LENGTH = 128 * 1024  # characters of a grammar; it travels with every choice
_NUM_REMEMBERED = 1024


class Form(NamedTuple):
    """``grammar`` is as disagg.grammar writes it; ``param`` is the field to blame for it."""

    grammar: str
    param: str


def requested_form(body: SharedFields, *, is_supported: bool) -> Form | None:
    """The one form that the body asks for, None where any text will do. Raises InvalidRequestError."""
    outputs = body.structured_outputs or StructuredOutputs()
    fields: list[tuple[str, Callable[[Any], str], Any]] = [
        (f"structured_outputs.{name}", build, getattr(outputs, name)) for name, build in _BUILDERS.items()
    ]
    fields += [(f"guided_{name}", build, getattr(body, f"guided_{name}", None)) for name, build in _BUILDERS.items()]
    if body.response_format is not None and body.response_format.type != "text":
        if body.response_format.type not in ("json_object", "json_schema"):
            raise refused("response_format", "type must be text, json_object or json_schema")
        fields.append(("response_format", _of_response_format, body.response_format))
    asked = [(param, build, value) for param, build, value in fields if value is not None and value is not False]
    if not asked:
        return None
    param, build, value = asked[0]
    if len(asked) > 1:
        raise refused(asked[1][0], f"not allowed together with {param}")
    if not is_supported:
        message = f"{param}: this server was installed without llguidance, which this needs: {grammar.INSTALL}"
        raise InvalidRequestError(message, param=param, code="unsupported_value")
    try:
        form = Form(build(value), param)
    except GrammarError as error:
        raise refused(param, str(error)) from error
    if len(form.grammar) > MAX_LENGTH:
        raise refused(param, f"{len(form.grammar)} characters; at most {MAX_LENGTH} are allowed")
    return form


class Forms(Protocol):
    async def check(self, form: Form) -> None:
        """Raises InvalidRequestError for a form that no answer can have, OverloadedError when it cannot be looked at now."""
        ...


class FormChecker:
    """Has forms tried out by a process of its own (``disagg.grammar_process``), one at a time, and remembers those that passed.

    ``model``: what that process reads its vocabulary from. It is started with ``start`` or by the first form.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._is_ready = False
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    async def start(self) -> None:
        """Begin to load the vocabulary, so that the first form need not wait for it."""
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "disagg.grammar_process", self._model, str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # the terminal's signals are for the server
            )

    async def check(self, form: Form) -> None:
        key = hashlib.blake2b(form.grammar.encode("utf-8", "replace")).digest()
        if key not in self._passed:
            try:
                async with asyncio.timeout(_WAIT_S), self._turn:
                    fault = await self._try(form.grammar)
            except TimeoutError:
                raise OverloadedError("too many forms of answers are waiting to be compiled", retry_after_s=1.0) from None
            if fault:
                raise refused(form.param, fault)
        self._passed[key] = None
        self._passed.move_to_end(key)
        if len(self._passed) > _NUM_REMEMBERED:
            self._passed.popitem(last=False)

    async def aclose(self) -> None:
        if (process := self._process) is not None:
            self._process, self._is_ready = None, False
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _try(self, grammar_text: str) -> str:
        """What is wrong with it, "" if nothing is."""
        await self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if not self._is_ready:
                if not await self._process.stdout.readline():
                    raise ConnectionError("it ended before it was ready")
                self._is_ready = True
            self._process.stdin.write(json.dumps(grammar_text).encode() + b"\n")
            async with asyncio.timeout(CHECK_S):
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except BaseException:  # also when the client has left: the answer that is on its way would be taken for another's
            await self.aclose()
            raise
        if line:
            return str(json.loads(line))
        await self.aclose()
        await self.start()  # for the next
        return "takes too long to compile; ask for something simpler"


def _of_response_format(asked: ResponseFormat) -> str:
    if asked.type == "json_object":
        return _of_object(True)
    if asked.json_schema is None or asked.json_schema.schema is None:
        raise GrammarError("json_schema.schema is missing")
    return _of_schema(asked.json_schema.schema)


def _of_schema(schema: dict[str, Any] | str) -> str:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise GrammarError(f"not the text of a JSON schema: {error}") from error
    return grammar.json_schema(schema)


def _of_object(_is_asked: bool) -> str:
    return grammar.json_schema({"type": "object"})


def _of_choice(texts: list[str]) -> str:
    if not texts:
        raise GrammarError("there is nothing to choose from")
    return grammar.choice(texts)


_BUILDERS: dict[str, Callable[[Any], str]] = {
    "json": _of_schema,
    "json_object": _of_object,
    "regex": grammar.regex,
    "choice": _of_choice,
    "grammar": grammar.lark_or_gbnf,
}


def refused(param: str, sentence: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {sentence}", param=param, code="invalid_value")
