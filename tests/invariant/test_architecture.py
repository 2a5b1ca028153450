"""The import rules of the architecture, and what may be imported without torch."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "bapo").rglob("*.py"))

# Which parts of bapo each part may import, besides itself. Only `train` and what starts it know both sides.
MAY_IMPORT = {
    "__init__": {"core"},
    "__main__": {"cli"},
    "types": set(),
    "buffer": {"types"},
    "core": {"types"},
    "tasks": {"types", "process"},
    "environments": {"types", "process", "models", "config", "tasks"},
    "rollout": {"types", "environments", "core.kernels", "core.wide", "models.bits", "models.layers"},
    "learn": {"types", "core", "models.layers"},
    "models": {"types", "demo", "process", "screen.terminal"},
    "demo": set(),
    "config": {"types", "buffer", "core.settings", "demo", "screen.terminal"},
    "runs": {"config", "screen.terminal"},
    "process": set(),
    "screen": set(),
    "pages": set(),
    "adapters": {"core"},
    "evaluate": {
        *(
            "types",
            "config",
            "demo",
            "tasks",
            "environments",
            "rollout",
            "models",
            "runs.files",
            "screen",
            "pages",
            "process",
        )
    },
    "diagnose": {"core", "config.errors", "config.numerals", "pages", "runs.files", "screen.terminal"},
    "compare": {"config", "process", "runs", "screen"},
    "report": {"types", "config", "pages", "runs", "screen.terminal"},
    "preflight": {"types", "config", "core.settings", "demo", "runs", "tasks"},
    "train": {
        *("__version__", "types", "buffer", "tasks", "rollout", "learn", "models", "config", "runs"),
        *("screen", "evaluate", "preflight", "process", "environments"),
    },
    "convert": {"config", "core.settings", "types", "screen.terminal"},
    "commands": {"__version__", "config", "runs", "screen.terminal", "tasks.data", "train", "preflight"},
    "cli": {
        *("__version__", "commands", "config", "runs", "models.smollm2"),
        "screen.terminal",
        "process",
    },
}
# The core is pure: torch and these parts of the standard library.
CORE_MAY_USE = {
    *("bapo", "torch", "__future__", "collections", "dataclasses", "difflib", "enum", "functools"),
    *("importlib", "inspect", "math", "typing", "triton"),
}
# Each of these appears in one file only: the seam to that library.
ONE_FILE = {
    *("trl", "verl", "openrlhf", "skyrl", "trinity"),
    *("datasets", "math_verify", "peft", "ray", "reasoning_gym"),
}
# Each of these appears in one folder only.
ONE_FOLDER = {"vllm": "rollout/vllm"}
# Parts that must stay importable without torch.
WITHOUT_TORCH = [
    *("bapo", "bapo.types", "bapo.buffer", "bapo.core.settings", "bapo.cli"),
    *("bapo.config.run", "bapo.config.sft", "bapo.config.recipe", "bapo.config.placement", "bapo.config.errors"),
    *("bapo.config.command_line", "bapo.config.words"),
    *("bapo.runs.read", "bapo.runs.write", "bapo.runs.statistics", "bapo.runs.metrics", "bapo.runs.files"),
    *("bapo.screen.view", "bapo.compare", "bapo.report"),
    *("bapo.diagnose.dumps", "bapo.diagnose", "bapo.evaluate", "bapo.evaluate.options"),
    *("bapo.tasks.task", "bapo.tasks.data.problems", "bapo.tasks.verify.sandbox"),
    *("bapo.process.limited_worker", "bapo.tasks.verify.math", "bapo.tasks.countdown"),
    *("bapo.demo", "bapo.preflight.examine", "bapo.commands.training"),
]
# The only modules on the top floor.
TOP_FLOOR = {"__init__", "__main__", "types", "buffer", "cli"}


@cache
def parsed(path):
    return ast.parse(path.read_text())


@cache
def imports(path):
    """Every module a file imports anywhere, as dotted names."""
    names = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def part(path):
    return path.relative_to(ROOT / "src" / "bapo").with_suffix("").parts[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_import_rules(path):
    here = part(path)
    allowed = MAY_IMPORT[here] | {here}
    for name in imports(path):
        if here == "core":
            assert name.split(".")[0] in CORE_MAY_USE, f"{path} must not import {name}"
        if name.startswith("bapo."):
            inner = name.removeprefix("bapo.")
            assert any(inner == a or inner.startswith(f"{a}.") for a in allowed), f"{path} must not import {name}"


def test_heavy_libraries_have_one_seam_each():
    for library in ONE_FILE:
        users = [path for path in SOURCES if any(name.split(".")[0] == library for name in imports(path))]
        assert len(users) == 1, f"{library} is imported by {users}"
    for library, folder in ONE_FOLDER.items():
        users = [path for path in SOURCES if any(name.split(".")[0] == library for name in imports(path))]
        assert {path.parent for path in users} == {ROOT / "src" / "bapo" / folder}, f"{library} is imported by {users}"


def test_every_allowance_is_used():
    for here, allowed in MAY_IMPORT.items():
        names = {name for path in SOURCES if part(path) == here for name in imports(path)}
        for inner in allowed:
            used = any(name == f"bapo.{inner}" or name.startswith(f"bapo.{inner}.") for name in names)
            assert used, f"nothing in {here} imports {inner}: remove the allowance"


def test_no_module_imports_itself_by_way_of_others():
    modules = {f"bapo.{'.'.join(path.relative_to(ROOT / 'src/bapo').with_suffix('').parts)}": path for path in SOURCES}
    graph = {name: {found for found in imports(path) if found in modules} for name, path in modules.items()}
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the modules


def test_the_loop_fits_a_reader():
    assert len((ROOT / "src" / "bapo" / "train" / "loop.py").read_text().splitlines()) <= 150


def test_every_module_opens_with_its_idea():
    for path in SOURCES:
        assert ast.get_docstring(parsed(path)), f"{path} has no docstring"


# Imports the modules it is given one after the other, and prints those at which anything asked for torch. What an
# earlier one has imported is not imported again; had that asked for torch, the earlier one would have been printed.
WHO_ASKS_FOR_TORCH = """
import importlib, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            asked.add(module)
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Watch())
asked = set()
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        if module not in asked:
            raise
print(*sorted(asked))
"""


def asking_for_torch(*modules):
    command = [sys.executable, "-c", WHO_ASKS_FOR_TORCH, *modules]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_these_import_no_torch():
    assert asking_for_torch(*WITHOUT_TORCH) == []
    assert asking_for_torch("bapo.types", "bapo.core.bounds") == ["bapo.core.bounds"]  # it would be seen


def test_public_names_resolve():
    import bapo

    for name in bapo.__all__:
        assert getattr(bapo, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'polisy_loss'"):
        _ = bapo.polisy_loss


def test_the_top_floor_holds_five_modules():
    assert {path.stem for path in (ROOT / "src" / "bapo").glob("*.py")} == TOP_FLOOR


def test_tests_of_units_lie_where_their_modules_lie():
    tests = ROOT / "tests" / "unit"
    for path in tests.rglob("test_*.py"):
        room = ROOT / "src" / "bapo" / path.parent.relative_to(tests)
        modules = {module.stem for module in room.glob("*.py")} | {room.name}
        stem = path.stem.removeprefix("test_")
        assert any(stem == module or stem.startswith(f"{module}_") for module in modules), (
            f"{path}: no module of {room.name}"
        )
