"""The script that runs the commands of the pages: what it finds in a page, and what it makes of it."""

import subprocess

import pytest

from tests import commands

PAGE = """Text.

```sh
echo one   # a comment
echo two \\
    three
```

<!-- ci: add --steps 2 -->
```sh
echo train    # long
# only a comment
```

<!-- ci: skip, needs a GPU -->
```sh
exit 7
```

```python title="a file.py"
print("it's")
```

```python
raise SystemExit("not run")
```

```sh
cat 'a file.py'
```
"""


def test_blocks_are_run_written_lengthened_or_left_out():
    text, skipped = commands.script(PAGE)
    assert skipped == ["needs a GPU"]
    assert "exit 7" not in text
    assert "not run" not in text


def test_the_script_does_what_the_page_says(tmp_path):
    text, _ = commands.script(PAGE)
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=True)
    shown = [line for line in done.stdout.splitlines() if not line.startswith("$")]
    assert shown == ["one", "two three", "train --steps 2", 'print("it\'s")']


def test_the_first_failure_ends_a_page(tmp_path):
    text, _ = commands.script("```sh\nfalse | cat\ntouch later\n```\n")
    assert subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True).returncode == 1
    assert not (tmp_path / "later").exists()


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="neither 'add WORDS' nor 'skip, REASON'"):
        commands.script("<!-- ci: ignore -->\n```sh\nls\n```\n")


@pytest.mark.parametrize("page", commands.PAGES)
def test_every_page_has_something_to_run_or_says_why_not(page):
    text, skipped = commands.script((commands.ROOT / page).read_text())
    assert "printf" in text or skipped
    assert subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True).stderr == ""
