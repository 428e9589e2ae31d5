"""A planted bug as a change of text, applied to the functions of the loaded module and taken back afterwards.

The changed source is compiled, never imported: the functions whose code differs get the new code, so that whoever has
imported them, or their class, runs it too.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from tests.sim.schedules import Schedule


@dataclass(frozen=True)
class Mutant:
    name: str
    module: str
    edits: Mapping[str, str]  # old → new text; each old one occurs exactly once in the module's source
    schedule: Schedule  # that shows it


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """While this lasts, the bug is there. Raises AssertionError when the code that it changes is not."""
    module = importlib.import_module(mutant.module)
    path = Path(inspect.getsourcefile(module) or "")
    source = path.read_text(encoding="utf-8")
    bugged = source
    for old, new in mutant.edits.items():
        assert source.count(old) == 1, f"mutant {mutant.name}: its text occurs {source.count(old)} times in {path}: {old!r}"
        bugged = bugged.replace(old, new)
    before, after = (_functions(compile(text, path, "exec")) for text in (source, bugged))
    changed = {_find(module, name): code for name, code in after.items() if before.get(name) != code}
    assert changed, f"mutant {mutant.name} changes nothing"
    originals = {function: function.__code__ for function in changed}
    try:
        for function, code in changed.items():
            function.__code__ = code
        yield
    finally:
        for function, code in originals.items():
            function.__code__ = code


def _functions(code: CodeType) -> dict[str, CodeType]:
    """Functions of a module and methods of its classes, by qualified name; what is inside them goes with them."""
    found: dict[str, CodeType] = {}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            is_function = bool(constant.co_flags & inspect.CO_NEWLOCALS)
            found |= {constant.co_qualname: constant} if is_function else _functions(constant)
    return found


def _find(module: ModuleType, name: str) -> FunctionType:
    found: object = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    found = found.fget if isinstance(found, property) else inspect.unwrap(getattr(found, "__func__", found))  # type: ignore[arg-type]
    assert isinstance(found, FunctionType), name
    return found
