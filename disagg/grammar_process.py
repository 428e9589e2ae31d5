"""Tries grammars out, in a process that may die of one: ``python -m disagg.grammar_process MODEL``. The server starts it.

Compiling can take minutes for an expression of a few hundred characters, nothing can interrupt it, and no limit that the
library has foresees every such case. So it is done here first: one line with a grammar in, one line with what is wrong with it
out, "" for nothing. A grammar that takes more than CPU_S ends the process, and that is its answer; one that passes costs a worker
no more than that. It ends when its input does.
"""

from __future__ import annotations

import json
import signal
import sys

from disagg.errors import GrammarError
from disagg.grammar import Compiler
from disagg.model import find_model
from disagg.text.grammar_vocabulary import grammar_vocabulary
from disagg.text.tokenizer import load_tokenizer

CPU_S = 0.3
"""Of processor time, so that a busy host does not refuse what an idle one takes. A worker's streams pause for as long, once."""


def main() -> None:
    compiler = Compiler(grammar_vocabulary(load_tokenizer(find_model(sys.argv[1]))))
    _answer("")  # ready
    for line in sys.stdin.buffer:
        grammar = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends a process that does not expect it
        try:
            compiler.check(grammar)
            fault = ""
        except GrammarError as error:
            fault = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(fault)


def _answer(fault: str) -> None:
    sys.stdout.write(json.dumps(fault[:1000]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
