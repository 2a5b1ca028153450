"""Runs every command of README, quickstart and tutorials in a fresh clone, as a reader would.

    python tests/commands.py [--environment .venv] [PAGE ...]

Every page is one session of bash that begins in a new clone of the last commit. A block that begins with ```sh is run;
a block with title="NAME" is written to that file; a comment above a block changes what happens:

    <!-- ci: add WORDS -->        the words are added to every command of the block
    <!-- ci: skip, REASON -->     the block is not run, and the reason is printed

The clone's .venv is a link to the given environment, which must be installed already. PYTHONPATH leads to the clone, so
that its own code runs. The first command that fails ends the page, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/quickstart.md",
    *sorted(f"docs/tutorials/{p.name}" for p in (ROOT / "docs/tutorials").glob("*.md")),
)
NOT_COPIED = (".venv*", ".smollm2", "runs", "site", "dist", "build", "__pycache__", ".*_cache", ".hypothesis")
BLOCK = re.compile(
    r"^(?:<!-- ci: (?P<rule>[^\n]*?) -->\n+)?```(?P<kind>\w+)(?:[ ]+title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of a page that is run or written."""

    text: str
    title: str | None = None
    """The file to write; None if the block is to be run."""
    add: str = ""
    skip: str = ""


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page that matter, in order."""
    for found in BLOCK.finditer(page):
        rule, kind, title = found["rule"] or "", found["kind"], found["title"]
        word, _, rest = rule.replace(",", " ", 1).partition(" ")
        if word not in ("", "add", "skip"):
            raise ValueError(f"<!-- ci: {rule} --> is neither 'add WORDS' nor 'skip, REASON'.")
        if title or kind == "sh":
            yield Block(found["text"], title, **{word: rest.strip()} if word else {})


def commands(text: str) -> list[str]:
    """The commands of a block. A backslash at the end of a line joins it with the next one."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def with_words(command: str, words: str) -> str:
    """A command with words added at its end, before the comment if it has one."""
    bare, mark, comment = command.partition("  #")
    return f"{bare.rstrip()} {words}{mark}{comment}" if words else command


def script(page: str) -> tuple[str, list[str]]:
    """A page as one bash script that shows every command before it runs it, and the reasons for what is left out."""
    lines, skipped = ["set -eo pipefail"], []
    for block in blocks(page):
        if block.skip:
            skipped.append(block.skip)
        elif block.title:
            lines.append(f"cat > {shlex.quote(block.title)} <<'END-OF-FILE'\n{block.text}END-OF-FILE")
        else:
            for command in commands(block.text):
                shown = with_words(command, block.add)
                lines += [f"printf '%s\\n' {shlex.quote('$ ' + shown)}", shown]
    return "\n".join(lines) + "\n", skipped


def clone(target: Path, environment: Path) -> None:
    """A clone of the last commit, whose environment is a link. make finds old files, so it does not install anew.

    Where the checkout is not a repository, it is copied.
    """
    if (ROOT / ".git").exists():
        subprocess.run(["git", "-c", "safe.directory=*", "clone", "--quiet", str(ROOT), str(target)], check=True)
    else:
        shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    (target / ".venv").symlink_to(environment.resolve())
    for path in (target / "pyproject.toml", *target.glob("constraints/*.txt")):
        os.utime(path, (0, 0))


def run(page: str, environment: Path) -> bool:
    """Run one page; returns whether every command worked."""
    text, skipped = script((ROOT / page).read_text(encoding="utf-8"))
    print(f"== {page}", flush=True)
    for reason in skipped:
        print(f"   not run: {reason}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "clone"
        clone(target, environment)
        surroundings = os.environ | {"PYTHONPATH": str(target / "src"), "TERM": "dumb"}
        code = subprocess.run(["bash", "-c", text], cwd=target, env=surroundings, check=False).returncode
    print(f"== {page}: {'works' if code == 0 else f'exit code {code}'}, {time.monotonic() - began:.0f} s", flush=True)
    return code == 0


def main() -> None:
    """Run the given pages, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv")
    parser.add_argument("pages", nargs="*", default=PAGES)
    arguments = parser.parse_args()
    broken = [page for page in arguments.pages if not run(page, arguments.environment)]
    if broken:
        sys.exit(f"Commands failed in: {', '.join(broken)}")


if __name__ == "__main__":
    main()
