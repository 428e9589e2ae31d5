"""Tries grammars out, in processes that may die of one: ``python -m disagg.grammar_process MODEL PARENT_PID``.

Compiling can take minutes for an expression of a few hundred characters, nothing can interrupt it, and no limit that the
library has foresees every such case. So it is done here first. A line in is ``[number, grammar, seconds]``, a line out
``[number, fault]``: what is wrong with that grammar, "" for nothing, null when it took more processor time than those seconds,
or all memory or stack. The vocabulary is read once, before the first line out, ``null``; then each grammar gets a process
forked off, and that one a parent to see it die, so that none costs another anything. What passes costs a worker no more than
it did here. The server starts this; it ends when its input does, and with the server in every case.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys

from disagg.errors import GrammarError
from disagg.grammar import Compiler, Vocabulary
from disagg.model import ModelFiles, find_model, forget_files, read_model_spec
from disagg.text.grammar_vocabulary import grammar_vocabulary
from disagg.text.tokenizer import load_tokenizer

_NICE = 5  # streams come first, and so do workers that still load
_LONGEST_FAULT = 500  # characters: escaped, still a line that a pipe takes in one piece
_PR_SET_PDEATHSIG = 1


def main() -> None:
    _die_with(int(sys.argv[2]))
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiler = Compiler(_vocabulary(find_model(sys.argv[1])))
    forget_files()
    _tell(None)  # ready
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that see others die
    own_pid = os.getpid()
    for line in sys.stdin.buffer:
        number, grammar, cpu_s = json.loads(line)
        if os.fork() == 0:
            _die_with(own_pid)
            _try(compiler, number, grammar, cpu_s)
            os._exit(0)


def _vocabulary(files: ModelFiles) -> Vocabulary:
    tokenizer = load_tokenizer(files)
    return grammar_vocabulary(tokenizer, min(read_model_spec(files).vocab_size, tokenizer.vocab_size))


def _try(compiler: Compiler, number: int, grammar: str, cpu_s: float) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    own_pid, pid = os.getpid(), os.fork()
    if pid == 0:
        _die_with(own_pid)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends a process that does not expect it
        try:
            compiler.check(grammar)
            fault = ""
        except GrammarError as error:
            fault = str(error)[:_LONGEST_FAULT]
        signal.setitimer(signal.ITIMER_PROF, 0)
        _tell([number, fault])
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        _tell([number, None])


def _die_with(parent_pid: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(0)


def _tell(what: object) -> None:
    os.write(sys.stdout.fileno(), json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    main()
