"""The fields that give an answer its form: ``response_format``, ``structured_outputs`` and the older ``guided_*``.

A form is a grammar and the field that asked for it. Before its request is submitted it is tried out (``form_checker``), so that
whatever is wrong with it is a 400 that names the field; the workers compile what has passed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from disagg import grammar
from disagg.api.types import ResponseFormat, SharedFields, StructuredOutputs
from disagg.errors import GrammarError, InvalidRequestError

MAX_LENGTH = 128 * 1024  # characters of a grammar; it travels with every choice


class Form(NamedTuple):
    """``grammar`` is as disagg.grammar writes it; ``param`` is the field to blame for it.

    ``parts``: what it was put together from, to be tried before it, so that the right field is blamed.
    """

    grammar: str
    param: str
    parts: tuple[Form, ...] = ()


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
    if isinstance(value, str):
        _check_length(value, param)  # reading rules takes long
    try:
        return bounded(Form(build(value), param))
    except GrammarError as error:
        raise refused(param, str(error)) from error


def bounded(form: Form) -> Form:
    """``form`` itself. Raises InvalidRequestError for one that is too long to travel with every choice."""
    _check_length(form.grammar, form.param)
    return form


def _check_length(text: str, param: str) -> None:
    if len(text) > MAX_LENGTH:
        raise refused(param, f"{len(text)} characters; at most {MAX_LENGTH} are allowed")


class Forms(Protocol):
    async def check(self, form: Form) -> None:
        """Raises InvalidRequestError for a form that no answer can have.

        And OverloadedError or UnavailableError when it cannot be looked at now.
        """
        ...


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
