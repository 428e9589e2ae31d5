"""Grammars in the engine: where each answer of a batch stands in its own, what it may draw next, and when it is whole.

A sequence meets its grammar at the first token that is sampled for it here, and then its matcher stays with it, through
preemptions too. What it had generated before, on another worker, the matcher reads then, once.
"""

from __future__ import annotations

import structlog

from disagg.engine.base import Sequence
from disagg.errors import GrammarError
from disagg.grammar import Compiler, Mask, Matcher

log = structlog.get_logger()


class Grammars:
    """``compiler`` None: this engine cannot follow any.

    Both methods raise GrammarError, and say so in the log, when there is no telling: then the sequence gets no token.
    """

    def __init__(self, compiler: Compiler | None) -> None:
        self._compiler = compiler

    def allowed(self, sequence: Sequence) -> Mask | None:
        """Which ids may come next; None where all may."""
        params = sequence.params
        if params.grammar is None:
            return None
        try:
            if sequence.matcher is None:
                sequence.matcher = self._begin(sequence, params.grammar)
            return sequence.matcher.allowed(may_stop=sequence.num_generated >= params.min_tokens)
        except GrammarError as error:
            self._give_up(sequence, error)
            raise

    def read(self, sequence: Sequence, token: int) -> bool:
        """``token`` has been drawn from what was allowed. True: it completes the answer."""
        if sequence.matcher is None:
            return False
        try:
            sequence.matcher.read([token])
        except GrammarError as error:
            self._give_up(sequence, error)
            raise
        return sequence.matcher.is_complete

    def _begin(self, sequence: Sequence, grammar: str) -> Matcher:
        if self._compiler is None:
            raise GrammarError("this engine has no grammars")
        matcher = self._compiler.matcher(grammar, sequence.params.stop_token_ids)
        matcher.read(sequence.tokens[sequence.num_prompt :])
        return matcher

    def _give_up(self, sequence: Sequence, error: GrammarError) -> None:
        log.warning("grammar cannot be followed", dispatch=sequence.dispatch, reason=str(error))
        if self._compiler is not None and sequence.params.grammar is not None:
            self._compiler.forget(sequence.params.grammar)
