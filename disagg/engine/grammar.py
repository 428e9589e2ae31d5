"""Grammars in the engine: where each answer of a batch stands in its own, what it may draw next, and when it is whole.

A sequence meets its grammar at the first token that is sampled for it here, and then its matcher stays with it, through
preemptions too. What it had generated before, on another worker, the matcher reads then, once.

What the matchers of one grammar find out they share, up to a limit: an answer can meet it because of others before it. So it
begins once more then, on its own, with the grammar compiled afresh. If that gets no further, the grammar is at fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import structlog

from disagg.engine.base import Sequence
from disagg.errors import GrammarError
from disagg.grammar import Mask, Matcher, Matchers

log = structlog.get_logger()

Told = TypeVar("Told")


class Grammars:
    """``matchers`` None: this engine cannot follow any.

    Both methods raise GrammarError, and say so in the log, when there is no telling: then the sequence gets no token.
    """

    def __init__(self, matchers: Matchers | None) -> None:
        self._matchers = matchers

    def allowed(self, sequence: Sequence) -> Mask | None:
        """Which ids may come next; None where all may."""
        if sequence.params.grammar is None:
            return None
        may_stop = sequence.num_generated >= sequence.params.min_tokens
        return self._ask(sequence, lambda matcher: matcher.allowed(may_stop=may_stop))

    def read(self, sequence: Sequence, token: int) -> bool:
        """``token`` has been drawn from what was allowed. True: it completes the answer."""
        if sequence.matcher is None:
            return False

        def read(matcher: Matcher) -> bool:
            matcher.read([token])
            return matcher.is_complete

        return self._ask(sequence, read)

    def _ask(self, sequence: Sequence, question: Callable[[Matcher], Told]) -> Told:
        """What ``question`` gets from the sequence's matcher, or from the one that it begins anew with."""
        grammar = sequence.params.grammar
        assert grammar is not None
        if self._matchers is None:
            raise GrammarError("this engine has no grammars")
        try:
            if sequence.matcher is None:
                sequence.matcher = self._begin(self._matchers, grammar, sequence)
            return question(sequence.matcher)
        except GrammarError:
            self._matchers.forget(grammar)
        try:
            sequence.matcher = self._begin(self._matchers, grammar, sequence)
            return question(sequence.matcher)
        except GrammarError as error:
            self._matchers.forget(grammar)
            log.warning("grammar cannot be followed", dispatch=sequence.dispatch, reason=str(error))
            raise

    @staticmethod
    def _begin(matchers: Matchers, grammar: str, sequence: Sequence) -> Matcher:
        matcher = matchers.matcher(grammar, sequence.params.stop_token_ids)
        matcher.read(sequence.tokens[sequence.num_prompt :])
        return matcher
