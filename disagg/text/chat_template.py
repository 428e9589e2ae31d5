"""A chat as the token ids that the model was tuned on: the model's own Jinja template, rendered once and tokenised once.

Templates come with model files, never with requests, and still run in an immutable sandbox. What participants wrote is data
in them: control tokens in it are marked before rendering (``Tokenizer.distrust``), so that of the rendered text only the
template's own control tokens count. Without such text the ids are those of transformers' ``apply_chat_template``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from disagg.errors import InvalidRequestError, UnsupportedModelError
from disagg.model import ModelFiles
from disagg.text.chat_messages import map_strings, template_messages
from disagg.text.tokenizer import Tokenizer, open_vocabulary
from disagg.text.trust import unguessable

_RESERVED = {"chat_template", "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"}
_END_MARK = unguessable()
# What template code raises on messages that it was not written for: its own errors, and Python's from within expressions.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class ChatTemplate:
    """``source`` compiled. ``special_names`` are the variables such as ``bos_token``; ``clock`` tells ``strftime_now`` the time.

    Raises UnsupportedModelError for a source that does not compile.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        special_names: dict[str, str],
        *,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        try:
            self._keeps_parts = _iterates_content(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UnsupportedModelError(f"the model's chat template does not compile: {error}") from error
        self.source = source
        self._tokenizer = tokenizer
        self._special_names = special_names

    def encode(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The prompt's ids. BOS is the template's business: none is added here.

        ``continue_final_message`` ends the prompt with the last message's text, open for more; it excludes
        ``add_generation_prompt``. ``kwargs`` are further variables of the template. Raises InvalidRequestError for messages
        that the template refuses or cannot render, with its reason, for ``kwargs`` that would replace what is ours, and for
        a prompt that is far longer than ``max_tokens`` (one that is a little longer comes back as it is).
        """
        if reserved := sorted((_RESERVED | self._special_names.keys()) & (kwargs or {}).keys()):
            raise InvalidRequestError(f"chat_template_kwargs cannot set {reserved[0]!r}", param="chat_template_kwargs")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        distrust = self._tokenizer.distrust
        try:
            chat = map_strings(template_messages(messages, keep_parts=self._keeps_parts), distrust)
            if continue_final_message:
                _mark_end(chat)
            text = self._template.render(
                {
                    "documents": None,
                    **map_strings(kwargs or {}, distrust),
                    **self._special_names,
                    "messages": chat,
                    "tools": map_strings(tools, distrust),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _TEMPLATE_ERRORS as error:
            reason = self._tokenizer.unmark(str(error))[:300] or type(error).__name__
            raise InvalidRequestError(f"the chat template refuses these messages: {reason}", param="messages") from error
        if continue_final_message:
            text = _cut_at_end(text)
        if max_tokens is not None:
            self._tokenizer.require_fit(text, max_tokens, "messages")
        return self._tokenizer.encode_trusted(text)


def load_chat_template(files: ModelFiles, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The model's chat template, None where it has none. Raises UnsupportedModelError, ConfigError."""
    vocabulary = open_vocabulary(files)
    source = vocabulary.chat_template()
    return None if source is None else ChatTemplate(source, tokenizer, vocabulary.special_names())


class _Generation(Extension):
    """``{% generation %}`` … ``{% endgeneration %}`` shows trainers the model's own text. For a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, and the models were not tuned on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether the template loops over a message's content, so that it reads parts and not only strings."""
    for loop in tree.find_all(nodes.For):
        match loop.iter:
            case nodes.Name(name="content") | nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                return True
    return False


def _mark_end(chat: list[dict[str, Any]]) -> None:
    """Put a mark behind the final message's text. The space after it tells whether the template trims what it writes."""
    final = chat[-1] if chat else {}
    if isinstance(final.get("content"), str):
        final["content"] += f"{_END_MARK} "
    elif final.get("content"):
        final["content"][-1]["text"] += f"{_END_MARK} "
    else:
        raise InvalidRequestError("continue_final_message: the final message has no text to continue", param="messages")


def _cut_at_end(text: str) -> str:
    end = text.rfind(_END_MARK)
    if end < 0:
        raise InvalidRequestError("continue_final_message: the chat template leaves the final message out", param="messages")
    return text[:end] if text.startswith(f"{_END_MARK} ", end) else text[:end].rstrip()
