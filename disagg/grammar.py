"""What an answer may be, as a grammar, and which tokens it allows next. llguidance does the work; only this module knows it.

    schema, expression, choices, rules ─▶ canonical text ─▶ compiled once in the parent, to see that it can be ─▶ SamplingParams
        ─▶ in a worker, for each answer, a Matcher: allowed ─▶ (draw) ─▶ read ─▶ allowed ─▶ … ─▶ is_complete

A matcher reads what has been generated and never the prompt. Its place depends on those tokens only, so whoever begins in the
middle of an answer (decode after prefill, the next worker after a failover) reads them once, and stands where the one before
it stood. Compiling and every step are bounded: a grammar beyond the bounds raises GrammarError, here or there.

The parent needs this as much as the engine does, so there is no torch.
"""

from __future__ import annotations

import importlib.util
import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from disagg.errors import GrammarError

if TYPE_CHECKING:
    import llguidance

INSTALL = "pip install 'disagg[structured]'"

Mask = npt.NDArray[np.bool_]

_NUM_COMPILED = 32
"""Grammars that are kept. The worst of them grows to some 40 MB, where _MAX_LEXER_STATES ends it."""

_MAX_LEXER_STATES = 100_000
"""Of one grammar, for all its answers together: an expression such as ``.*a.{40}`` makes a new one with almost every token."""

_MAX_STEP_ITEMS = 5_000
"""Of the parser, for one mask. Rules that read a text in many ways (``s: s s | "a"``) need more with every token: at the
library's 50,000 a step takes 0.7 s, for which every stream of the worker waits, and at this 40 ms. 500 optional properties
need 2,100."""

_LOOK_AHEAD = 64  # bytes
_LONGEST_MESSAGE = 280
_NOTHING_FITS = ("NoExtension", "NoExtensionBias")  # the library's words
_FORM = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""How JSON is written: on one line, a space after a comma or colon or none. Where any whitespace may stand, small models write it
until their answer is cut."""


def is_installed() -> bool:
    """Whether grammars can be used on this host."""
    return importlib.util.find_spec("llguidance") is not None


# ------------------------------------------------------------------------------------------------ the canonical text


def json_schema(schema: dict[str, Any]) -> str:
    """JSON that is valid under ``schema``, its properties in the schema's order."""
    return json.dumps({"grammars": [{"json_schema": json_form(schema)}]}, ensure_ascii=False)


def json_form(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` as rules hold it after ``%json``, with the one way in which JSON is written here."""
    return {**schema, "x-guidance": _FORM}


def regex(pattern: str) -> str:
    r"""Text that ``pattern`` matches from its beginning to its end; anchors there say nothing new, and may be left out.

    ``\d``, ``\w`` and ``\s`` mean ASCII, as in JSON schemas: who asks for digits does not expect those of another script.
    """
    import llguidance

    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2:  # else a backslash makes it a character
        pattern = pattern[:-1]
    return lark(f"start: /{llguidance.regex_to_lark(pattern, 'dws')}/")


def choice(texts: Sequence[str]) -> str:
    """One of ``texts``."""
    return lark("start: TEXT\nTEXT: " + " | ".join(literal(text) for text in texts))


def lark(rules: str) -> str:
    """What ``rules`` derive, written as llguidance reads Lark's notation."""
    return json.dumps({"grammars": [{"lark_grammar": rules}]}, ensure_ascii=False)


def lark_or_gbnf(rules: str) -> str:
    """As ``lark``, also for rules in llama.cpp's notation. Raises GrammarError for those that cannot be read."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return lark(any_to_lark(rules))
    except Exception as error:  # it raises several kinds, all for what it reads
        raise GrammarError(f"the rules cannot be read: {_one_line(str(error))}") from error


def literal(text: str) -> str:
    """``text`` as a terminal of the rules."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one character that they do not take as it is


def either(rules: str, grammar: str) -> str:
    """What ``rules`` derive or what ``grammar``, another canonical text, allows. The rules call that ``@other``."""
    (other,) = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": rules}, {"name": "other", **other}]}, ensure_ascii=False)


# ------------------------------------------------------------------------------------------------------- the matcher


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``tokens[i]`` are the bytes of id ``i``, none where there is no such token.

    ``special`` ids are no text, whatever their bytes say. ``ends`` end an answer; the first stands for all of them.
    """

    tokens: list[bytes]
    special: frozenset[int]
    ends: tuple[int, ...]


class Matchers(Protocol):
    """Where an engine gets its matchers."""

    def matcher(self, grammar: str, stop_token_ids: Collection[int]) -> Matcher:
        """A matcher at the beginning of ``grammar``, for an answer that ``stop_token_ids`` end.

        Raises GrammarError for a grammar that cannot be compiled, saying why.
        """
        ...

    def forget(self, grammar: str) -> None:
        """Compile it anew next time. What matchers of one grammar find out they share, up to a limit that ends them all."""
        ...


class Compiler:
    """Matchers over one vocabulary. The last grammars are kept, since many requests share a schema."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self._vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Table(vocabulary)), slices=None)
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def matcher(self, grammar: str, stop_token_ids: Collection[int]) -> Matcher:
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = self._compile(grammar)
            while len(self._compiled) >= _NUM_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled[grammar] = compiled
        return Matcher(compiled.deep_copy(), self._vocabulary, stop_token_ids)

    def forget(self, grammar: str) -> None:
        self._compiled.pop(grammar, None)

    def check(self, grammar: str) -> None:
        """Raises GrammarError unless ``grammar`` can be compiled, has a beginning and goes on from it.

        A rule that can never end, as in ``start: "a" start``, shows only there.
        """
        matcher = Matcher(self._compile(grammar), self._vocabulary, self._vocabulary.ends)
        matcher.read([int(matcher.allowed(may_stop=True).argmax())])

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        import llguidance

        limits = llguidance.LLParserLimits(step_max_items=_MAX_STEP_ITEMS, max_lexer_states=_MAX_LEXER_STATES)
        compiled = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if compiled.is_error():
            raise GrammarError(_one_line(compiled.get_error()))
        return compiled


class Matcher:
    """One answer's place in its grammar. Every method raises GrammarError once the grammar has become too complex to follow."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, stop_token_ids: Collection[int]) -> None:
        self.num_read = 0
        self.is_complete = False  # nothing may follow: the answer is whole
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._stops = [token for token in stop_token_ids if token < len(vocabulary.tokens)]
        # Of the client's own, an ordinary token is text like any other: it ends an answer wherever the grammar lets it stand.
        self._ends = [token for token in self._stops if token in vocabulary.special or token in vocabulary.ends]

    def __repr__(self) -> str:
        return f"<Matcher: {self.num_read} tokens read{', complete' if self.is_complete else ''}>"

    def allowed(self, *, may_stop: bool) -> Mask:
        """Which ids may come next, at least one. Ends of sequence may where the answer is whole.

        ``may_stop`` False keeps all stop ids out, unless nothing else is left.
        """
        vocabulary = self._vocabulary
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(bits, count=len(vocabulary.tokens), bitorder="little").astype(np.bool_)
        mask[list(vocabulary.ends)] = False
        mask[self._ends] = is_whole = self._matcher.is_accepting()
        if not may_stop:
            longer = mask.copy()
            longer[self._stops] = False
            mask = longer if longer.any() else mask
        if not mask.any():
            if not (is_whole and vocabulary.ends):
                raise GrammarError(f"after {self.num_read} tokens: no token of this model fits")
            mask[vocabulary.ends[0]] = True  # an empty answer, whose client wants no end of sequence: there is nothing else
        return mask

    def read(self, tokens: Sequence[int]) -> None:
        """Go on past ``tokens``, which were drawn where they were allowed."""
        for token in tokens:
            self.num_read += 1
            if token in self._ends or token in self._vocabulary.ends:
                self.is_complete = True
                return
            self._matcher.consume_token(token)
            self._check()
        self.is_complete = self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            error = _one_line(self._matcher.get_error())
            if error in _NOTHING_FITS:
                error = "nothing can follow, and nothing is whole"
            raise GrammarError(f"after {self.num_read} tokens: {error}")


class _Table:
    """The vocabulary as llguidance asks for it.

    Called with text that the grammar leaves no choice about, it gives the tokens to write it in, of which only the first is
    used: the longest that fits. Their bytes alone decide, so every host writes it in the same tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special)
        self.eos_token_id = vocabulary.ends[0] if vocabulary.ends else None
        self.bos_token_id = None
        self._ids = {text: token for token, text in enumerate(vocabulary.tokens) if token not in vocabulary.special}

    def __call__(self, text: bytes) -> list[int]:
        rest, found = text[:_LOOK_AHEAD], []
        while rest:
            size = next((size for size in range(len(rest), 0, -1) if rest[:size] in self._ids), 0)
            if not size:
                break
            found.append(self._ids[rest[:size]])
            rest = rest[size:]
        return found


def _one_line(message: str) -> str:
    """Fit for an answer; the reason often stands below a drawing of the place, and above a dump of the state."""
    return " ".join(message.partition("<state>")[0].split())[:_LONGEST_MESSAGE]
