"""The import rules of the architecture, and what may be imported without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "bapo").rglob("*.py"))

# Which parts of bapo each part may import, besides itself. Only `train` and what starts it know both sides.
MAY_IMPORT = {
    "__init__": {"core"},
    "types": set(),
    "core": {"types"},
    "tasks": {"types"},
    "buffer": {"types"},
    "rollout": {"types", "tasks", "watch"},
    "learn": {"types", "core"},
    "adapters": {"types", "core"},
    "demo": {"types", "tasks"},
    "dumps": set(),
    "diagnose": {"types", "core", "metrics", "dumps", "numbers"},
    "metrics": {"types"},
    "numbers": set(),
    "view": {"types", "watch"},
    "watch": set(),
    "errors": set(),
    "lock": {"errors"},
    "placement": {"errors"},
    "config": {"types", "core.settings", "tasks", "demo"},
    "sft_config": {"config"},
    "recipe": {"errors", "config", "sft_config"},
    "models": {"types", "demo"},
    "evaluate": {"types", "tasks", "rollout", "metrics", "watch"},
    "evaluation": {"types", "errors", "placement", "lock", "demo", "tasks", "rollout", "evaluate", "models", "watch"},
    "runs": {"types", "errors", "recipe", "metrics"},
    "compare": {"types", "errors", "config", "recipe", "placement", "lock", "metrics", "numbers", "runs"},
    "report": {"types", "errors", "config", "metrics", "numbers", "runs"},
}
# The core is pure: torch and these parts of the standard library.
CORE_MAY_USE = {
    *("bapo", "torch", "__future__", "collections", "dataclasses", "difflib", "enum", "functools"),
    *("importlib", "inspect", "math", "typing", "triton"),
}
# Each of these appears in one file only: the seam to that library.
ONE_FILE = {
    *("vllm", "ray", "trl", "verl", "areal", "openrlhf", "skyrl", "tinker", "trinity"),
    *("datasets", "math_verify", "peft", "reasoning_gym"),
}
# Parts that must stay importable without torch.
WITHOUT_TORCH = [
    *("bapo", "bapo.types", "bapo.core.settings", "bapo.config", "bapo.recipe", "bapo.placement"),
    *("bapo.metrics", "bapo.view", "bapo.runs", "bapo.lock", "bapo.errors"),
    *("bapo.compare", "bapo.report", "bapo.report.live", "bapo.cli", "bapo.sft_config"),
    *("bapo.dumps.updates", "bapo.diagnose.command", "bapo.tasks.dataset", "bapo.tasks.demonstrations"),
    *("bapo.tasks.sandbox", "bapo.tasks.worker", "bapo.tasks.math", "bapo.evaluate", "bapo.evaluation.command"),
]


def imports(path):
    """Every module a file imports anywhere, as dotted names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(path):
    return path.relative_to(ROOT / "src" / "bapo").with_suffix("").parts[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_import_rules(path):
    here = part(path)
    if here in ("train", "cli"):
        return
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
        assert len(users) <= 1, f"{library} is imported by {users}"


def test_the_loop_fits_a_reader():
    assert len((ROOT / "src" / "bapo" / "train" / "loop.py").read_text().splitlines()) <= 150


def test_every_module_opens_with_its_idea():
    for path in SOURCES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_imports_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_resolve():
    import bapo

    for name in bapo.__all__:
        assert getattr(bapo, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'polisy_loss'"):
        _ = bapo.polisy_loss
