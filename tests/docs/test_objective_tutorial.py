"""The objective of docs/tutorials/objective.md, added to a copy of the package as the page says, passes its test."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "objective.md").read_text()


def put_before(file, mark, text):
    """Put text before the only place where a mark stands."""
    content = file.read_text()
    assert content.count(mark) == 1, f"{file.name}: {mark!r}"
    file.write_text(content.replace(mark, text + mark))


def test_the_new_objective_passes_its_own_test(tmp_path):
    function, entries, test = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    shutil.copytree(ROOT / "src" / "bapo", tmp_path / "bapo")
    core = tmp_path / "bapo" / "core"
    put_before(core / "objectives.py", "@dataclass(frozen=True)\nclass Objective:", f"{function}\n\n")
    objective, options = (line for line in entries.splitlines(keepends=True) if "log_clip" in line)
    put_before(core / "objectives.py", '    "dppo": Objective(dppo),', objective)
    put_before(core / "settings.py", '    "dppo": {"delta": 0.15},', options)
    (tmp_path / "test_page.py").write_text(f"import math\n\nimport torch\nfrom bapo import policy_loss\n\n\n{test}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "test_page.py"]
    surroundings = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
