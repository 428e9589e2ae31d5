"""Tries grammars out, in a process that may die of one: ``python -m disagg.grammar_process MODEL PARENT_PID``.

Compiling can take minutes for an expression of a few hundred characters, nothing can interrupt it, and no limit that the
library has foresees every such case. So it is done here first: one line with a grammar in, one line with what is wrong with it
out, "" for nothing. A grammar that takes more than CPU_S ends the process, and that is its answer; one that passes costs a worker
no more than that. The server starts it; it ends when its input does, and with the server in every case.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

from disagg.errors import GrammarError
from disagg.grammar import Compiler
from disagg.model import find_model
from disagg.text.grammar_vocabulary import grammar_vocabulary
from disagg.text.tokenizer import load_tokenizer

CPU_S = 0.3
"""Of processor time, so that a busy host does not refuse what an idle one takes. A worker's streams pause for as long, once."""


_PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[2]):  # the server died before the line above
        return
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
