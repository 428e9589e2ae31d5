"""The rules of the tree, checked on its syntax: import direction, purity, size, and that tests are really collected."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Lowest first. A part imports parts of lower layers only; parts of one layer do not know each other.
LAYERS: list[set[str]] = [
    {"disagg"},
    {"errors", "distribution", "cores"},
    {"config"},
    {"settings", "log", "credentials", "notify", "units", "drain"},
    {"request", "kv", "grammar", "kernels"},
    {"messages", "model"},
    {"text", "channel", "engine", "handoff", "stream"},
    {"launcher", "session", "prefill", "decode", "probe", "lifetime", "speed", "remote"},
    {"supervisor", "link", "worker"},
    {"overdue"},
    {"pairs", "metrics", "tracing", "deployment"},
    {"routes", "nodes", "vllm_metrics"},
    {"router"},
    {"operations", "flip"},
    {"api"},
    {"serve", "node", "worker_process", "grammar_process"},
    {"chat", "status", "top", "doctor"},
    {"verify"},
    {"cli"},
    {"__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

HEAVY = {"torch", "triton", "cuda"}
CLOCKS_AND_CHANCE = {"time", "random", "secrets", "datetime", "uuid"}
PURE = ("request", "kv", "messages", "engine.base", "engine.scheduler", "engine.blocks", "handoff.protocol", "handoff.plan")
NO_ASYNCIO = ("request", "kv", "messages", "engine", "kernels", "handoff.protocol", "handoff.plan")
MAX_LINES = 600


def _module_name(path: Path) -> str:
    """Below disagg: ``engine.blocks``; a package's ``__init__`` is the package; kernels/ is ``kernels``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    below = parts[1:] if parts[0] == "disagg" else parts
    return ".".join(part for part in below if part != "__init__") or "disagg"


MODULES = {_module_name(path): path for folder in ("disagg", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))}
TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def _imports(path: Path) -> Iterator[str]:
    """Full dotted names of everything imported anywhere in the file, also inside functions. Relative imports start with a dot."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            # ``from disagg import kv`` imports a module, ``from disagg import __version__`` the package's own name.
            yield from (
                f"disagg.{alias.name}" if base == "disagg" and alias.name != "__version__" else base for alias in node.names
            )


def _foreign(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in _imports(path)}


def _ours(path: Path) -> set[str]:
    """Parts of this package that the file imports: ``engine`` for ``disagg.engine.blocks``."""
    names = [name.split(".") for name in _imports(path) if name.partition(".")[0] == "disagg"]
    return {parts[1] if len(parts) > 1 else "disagg" for parts in names}


def _part(module: str) -> str:
    return module.partition(".")[0]


def _is_in(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards_only(module: str) -> None:
    """A part imports itself and lower layers; every part has a place in the table; no relative imports."""
    part = _part(module)
    assert part in LEVEL, f"{part} has no layer: give it one in LAYERS"
    imported = _ours(MODULES[module]) - {part}
    assert imported <= LEVEL.keys(), f"{module} imports {imported - LEVEL.keys()}, which have no layer"
    assert {name for name in imported if LEVEL[name] >= LEVEL[part]} == set()
    assert not [name for name in _imports(MODULES[module]) if name.startswith(".")]


@pytest.mark.parametrize("module", MODULES)
def test_each_library_stays_in_its_place(module: str) -> None:
    """torch in engine/, kernels/ and the CUDA transport; aiohttp in api/ and serve; asyncio out of the synchronous parts."""
    foreign = _foreign(MODULES[module])
    if not _is_in(module, ("engine", "kernels", "handoff.cuda_ipc")):
        assert not foreign & HEAVY
    if not _is_in(module, ("api", "serve")):
        assert "aiohttp" not in foreign
    if _is_in(module, NO_ASYNCIO):
        assert not foreign & {"asyncio", "uvloop", "anyio"}


@pytest.mark.parametrize("module", [name for name in MODULES if name in PURE])
def test_pure_modules_have_no_clock_and_no_chance(module: str) -> None:
    """Clocks and seeds are passed in, so that a run on a virtual clock repeats exactly."""
    assert not _foreign(MODULES[module]) & CLOCKS_AND_CHANCE


@pytest.mark.parametrize("module", MODULES)
def test_engine_and_handoff_meet_only_in_the_roles(module: str) -> None:
    """The engine does not know how KV moves, and transports do not know what computes it."""
    if module not in ("prefill", "decode", "probe", "worker", "worker_process"):
        assert not _ours(MODULES[module]) | {_part(module)} >= {"engine", "handoff"}


def test_the_parent_loads_no_torch() -> None:
    """Importing the server's composition root loads no torch: the parent starts fast and stays small."""
    probe = "import sys, disagg.serve; print(*sorted({'torch', 'triton', 'transformers'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


def test_help_is_quick_because_it_loads_no_server() -> None:
    """``disagg --help`` imports neither the server nor torch."""
    probe = "import sys, disagg.cli; print(*sorted({'torch', 'aiohttp', 'disagg.serve'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


@pytest.mark.parametrize("module", MODULES)
def test_modules_stay_short_and_say_what_they_are(module: str) -> None:
    """At most MAX_LINES lines, and a docstring at the head of everything that is not empty."""
    source = MODULES[module].read_text(encoding="utf-8")
    assert source.count("\n") <= MAX_LINES
    assert not source.strip() or ast.get_docstring(ast.parse(source))


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_file_collects_tests_that_state_their_rule(path: Path) -> None:
    """A test file that pytest finds nothing in looks green for ever; a test without a docstring has no rule to check."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    tests = [function for function in functions if function.name.startswith("test_")]
    machines = [  # hypothesis: TestBlocks = Blocks.TestCase
        node
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id.startswith("Test")
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "TestCase"
    ]
    assert tests or machines
    assert [test.name for test in tests if not ast.get_docstring(test)] == []


def test_every_module_is_on_the_map() -> None:
    """The docstring of ``disagg`` names every part, so that a reader finds it."""
    text = ast.get_docstring(ast.parse(MODULES["disagg"].read_text(encoding="utf-8"))) or ""
    on_map = set(re.findall(r"^    (\w+)  |``(\w+)``", text, re.MULTILINE))
    assert {_part(module) for module in MODULES} - {"disagg", "__main__"} - {first or second for first, second in on_map} == set()


def test_every_package_is_installed() -> None:
    """A folder that pyproject.toml does not list works from the tree and is missing from the wheel."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in MODULES.values()}
    names = {"disagg.kernels" if folder == Path("kernels") else ".".join(folder.parts) for folder in folders}
    assert set(setup["packages"]) == names
