"""What the pages name exists: commands, options, keys and their defaults, files, extras, metrics, imports and figures.

A page is checked by what it writes as code. `bapo` commands are read by the parsers of the commands themselves, and a
recipe or grid that comes with bapo is checked together with the keys beside it; nothing is run. Words in capitals, such
as RUN, and an ellipsis stand for something of the reader's.
"""

import ast
import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

from bapo.cli import COMMANDS, named, run
from bapo.config import errors
from bapo.config.command_line import parse_arguments, parse_resume
from bapo.config.errors import Answered, BapoError
from bapo.config.recipe import check, read_recipe_for, shipped
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.config.words import flat, leaves, merged, read_words
from bapo.runs import metrics
from tests.processes import script

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
OTHER_FILES = [
    *(ROOT / "src/bapo/starters").glob("*.*"),
    *(ROOT / "src/bapo/recipes").glob("*.toml"),
    *(ROOT / "examples").glob("*.*"),
]
SCHEMAS = {"train": Config, "doctor": Config, "sft": SftConfig}
SWITCHES = {"train": ("list", "dry-run"), "doctor": (), "sft": ("list",)}
KEYS = {schema: leaves(schema) for schema in (Config, SftConfig)}
SECTIONS = {key.partition(".")[0] for kind in KEYS.values() for key in kind if "." in key}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
METRICS = {
    *metrics.UPDATE, *metrics.ROLLOUT, *metrics.BUFFER, *metrics.EVAL, *metrics.IMITATION, *metrics.HELD_OUT,
    *metrics.SKIPPED, *metrics.TIMING,
}  # fmt: skip
FOLDERS = ("src", "tests", "tools", "benchmarks", "examples", "docs", "constraints")
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
OURS = r"(?:\.venv/bin/)?(?:bapo|python|pytest)|make|pip|torchrun"
PINNED = {
    "trl": ("constraints/trl.txt", "trl"),
    "verl": ("constraints/verl.txt", "verl"),
    "areal": ("constraints/frameworks.txt", "areal"),
    "skyrl": ("constraints/frameworks.txt", "skyrl"),
    "tinker": ("constraints/frameworks.txt", "tinker"),
    "trinity": ("constraints/verl.txt", "trinity-rft"),
}
"""The page of an adapter, and where the version that it was tested with is pinned."""
MEASURED = ("docs/results.md", *(f"docs/notes/{path.name}" for path in sorted((ROOT / "docs/notes").glob("*.*"))))
"""Where our own figures are. Other pages write them in the same way, without a zero before the point."""


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def commands(text):
    """The commands of a page: from shell blocks, indented blocks and spans of code, each as a list of words."""
    fenced = [body for kind, body in BLOCK.findall(text) if kind in ("sh", "")]
    rest = BLOCK.sub("", text)
    indented = re.findall(r"(?:^ {4}\S.*\n)+", rest, flags=re.MULTILINE)
    spans = [span for span in SPAN.findall(rest) if " " in span]
    for block in [*fenced, *(re.sub(r"^ {4}", "", block, flags=re.MULTILINE) for block in indented), *spans]:
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r" && ", re.sub(r"(^|\s+)#.*", "", line)):
                bare = re.sub(r"^(?:\$ |[A-Z_]+=\S+ )+|\s>\s.*", "", part.strip())
                if re.fullmatch(rf"(?:{OURS}) [^\d ].*", bare):
                    yield shlex.split(bare)


def extras_for(words):
    """The extras that a command of ours needs besides `pip install .`."""
    words = [word.rpartition("/")[2] if word.endswith("bapo") else word for word in words]
    if "bapo" not in words or not {"train", "sft", "doctor"} & set(words):
        return set()
    kind = next(word for word in words[words.index("bapo") + 1 :])
    needed = {"ray"} if "--cluster.rollouts" in words else set()
    needed |= {"vllm"} if "vllm" in words else set()
    needed |= {"lora"} if "--model.lora.rank" in words else set()
    for name in set(words) & shipped(f"bapo {kind}").keys():
        task = tomllib.loads(shipped()[name].read_text()).get("task", {})
        sources = [*task.get("train", ()), *task.get("test", ())]
        needed |= {"data"} if any(not source.endswith(".jsonl") for source in sources) else set()
        needed |= {"math"} if kind == "train" and sources and task.get("reward", "math") == "math" else set()
    return needed


def placeholder(word):
    return "…" in word or word == "..." or re.fullmatch(r"[A-Z][A-Z0-9_.-]*", word.partition("/")[0]) is not None


def wrong_with(words):
    """What is wrong with a command, or None. A command without words is only mentioned."""
    if "bapo" in words[1:] and "-m" in words:  # torchrun and python -m
        words = words[words.index("bapo") :]
    program = words[0].rpartition("/")[2]
    if program == "bapo":
        return wrong_with_bapo(words[1:])
    if program == "make":
        return next((f"no target {w}" for w in words[1:] if "=" not in w and w not in TARGETS), None)
    if program == "pip":
        return wrong_with_pip(words)
    if program in ("python", "pytest"):
        return wrong_with_script(words)
    return None


def wrong_with_bapo(words):
    if not words or words[0] in ("--help", "--version") or placeholder(words[0]):
        return None
    command, *words = words
    if command not in COMMANDS:
        return f"no command {command}"
    if not words or words == ["--help"] or (placeholder(words[0]) and len(words) == 1):
        return None
    try:
        if command in SCHEMAS:
            return wrong_with_keys(command, words)
        if command == "resume":
            _, words = parse_resume(words)
            return wrong_with_keys("train", words, path="RUN") if words else None
        arguments = parse_arguments(named(COMMANDS[command].arguments), words, prog=f"bapo {command}")
    except (Answered, BapoError) as error:
        return f"bapo {command} does not read it: {error}"
    if command == "compare" and arguments.grid and not placeholder(str(arguments.grid)):
        name = str(arguments.grid)
        return None if name.endswith(".toml") or name in shipped("bapo compare") else f"no grid {name}"
    return None


def wrong_with_keys(command, words, path=None):
    schema = SCHEMAS[command]
    if words and words[-1].startswith("--") and words[-1][2:].replace("-", "_") in KEYS[schema]:
        words = words[:-1]  # a key named without a value
    given = read_words(schema, words, switches=SWITCHES[command])
    if given.unknown:
        return f"no option {given.unknown}"
    recipe = path or given.recipe
    if recipe and (placeholder(recipe) or recipe.endswith((".toml", ".json"))):
        return None
    values = read_recipe_for(f"bapo {'sft' if command == 'sft' else 'train'}", recipe) if recipe else {}
    if any(placeholder(str(value)) for _, value in flat(given.values)):
        return None
    return "; ".join(check(schema, merged(values, given.values))[1]) or None


def wrong_with_pip(words):
    if words[1:2] != ["install"]:
        return None
    for word in words[2:]:
        if word.startswith("constraints/") and not (ROOT / word).is_file():
            return f"no file {word}"
        extras = re.search(r"\[([\w,]+)\]$", word.partition("=")[0])
        if extras and word[0] in "./b" and (unknown := set(extras[1].split(",")) - set(EXTRAS)):
            return f"no extra {unknown}"
        if word == "bapo":
            return "bapo is not on PyPI"
    return None


def wrong_with_script(words):
    files = [word.partition("::")[0] for word in words[1:] if word.endswith(".py") or ".py::" in word]
    for file in files:
        if file.startswith(FOLDERS) and not (ROOT / file).is_file():
            return f"no file {file}"
    if files and (ROOT / files[0]).is_file():
        folder = (ROOT / files[0]).parent
        source = "".join(path.read_text() for path in folder.glob("*.py"))
        for word in words[words.index(files[0]) + 1 :]:
            option = word.partition("=")[0]
            if option.startswith("--") and f'"{option}"' not in source:
                return f"{files[0]} has no option {option}"
    return None


def key_exists(key, schemas=(Config, SftConfig)):
    """Whether it is a key, a table of keys, or an entry below a key that is a table of its own."""
    return any(
        key == known or known.startswith(f"{key}.") or key.startswith(f"{known}.")
        for schema in schemas
        for known in KEYS[schema]
    )


def wrong_spans(text):
    """Spans of code that name a key, an option, a file or a metric that does not exist."""
    for span in SPAN.findall(BLOCK.sub("", text)):
        word = re.split(r"[ =:]", span)[0]
        dotted = re.fullmatch(r"(?:--)?([a-z]+)\.([a-z][\w.-]*)", word)
        if dotted and dotted[1] in SECTIONS and not re.search(r"\.(json|jsonl|safetensors|sha256|toml|py)$", word):
            if not key_exists(word.removeprefix("--").replace("-", "_")):
                yield f"{span}: no such key"
        elif re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./*{{}}-]+", word.partition("::")[0]):
            if not list(ROOT.glob(re.sub(r"\{[^}]*\}", "*", word.partition("::")[0]).rstrip("/"))):
                yield f"{span}: no such file"
        elif re.fullmatch(r"(rollout|buffer|eval|imitation|held_out)/\w+", word) and not (
            {word, word.partition("/")[2]} & METRICS or (ROOT / "src/bapo" / word).exists()
        ):
            yield f"{span}: no such metric"


def wrong_defaults(text, schema):
    """Rows of tables of keys whose default is not that of the code."""
    defaults, known = dict(flat(json.loads(schema().model_dump_json()))), KEYS[schema]
    for table in re.findall(r"(?:^\|.*\n)+", BLOCK.sub("", text), flags=re.MULTILINE):
        head, _, *rows = table.splitlines()
        titles = [cell.strip() for cell in head.strip("|").split("|")]
        if not titles[0].startswith("key") or "default" not in titles[1:2]:
            continue
        section = re.search(r"`\[(\w+)\]`", titles[0])
        for row in rows:
            names, shown = (cell.strip() for cell in row.strip("|").split("|")[:2])
            keys, above = [], f"{section[1]}." if section else ""
            for name in re.findall(r"`([\w.]+)`", names):
                keys.append(name if name in known else above + name)
                above = above or name.rpartition(".")[0] + "."
            for key, value in zip(keys, shown.split(", "), strict=False):
                if key not in known:
                    yield f"{key}: no such key"
                elif (value := value.strip("`")) in ("none", "empty"):
                    if defaults.get(key) not in (None, "", [], {}):
                        yield f"{key}: {defaults[key]}, not {value}"
                elif re.fullmatch(r"[\d.e-]+|true|false|[a-z][\w-]*", value) and value != "derived":
                    real = defaults.get(key)
                    same = str(real).lower() == value or (re.fullmatch(r"[\d.e-]+", value) and real == float(value))
                    if not same:
                        yield f"{key}: {real}, not {value}"


def wrong_code(text):
    """Python blocks that do not parse or import what bapo does not have; recipes whose keys do not exist."""
    for kind, body in BLOCK.findall(text):
        if kind == "python":
            try:
                tree = ast.parse(body.replace("    ...\n", ""))
            except SyntaxError as error:
                yield f"python: {error}"
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "bapo":
                    for alias in node.names:
                        if alias.name not in defined(node.module):
                            yield f"{node.module} has no {alias.name}"
        if kind == "toml":
            values = tomllib.loads(body)
            tables = [values.get("base", values), *values.get("setting", [])]
            if isinstance(values.get("objective"), list):
                tables += values["objective"]
            for table in tables:
                table = {k: v for k, v in table.items() if not isinstance(v, list | str) or k in Config.model_fields}
                for key, _ in flat(table):
                    if not key_exists(key) and key not in ("recipe", "seeds"):
                        yield f"{key}: no such key"


@cache
def defined(module):
    """The names of a module of ours, read from its source."""
    path = ROOT / "src" / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def figures(text):
    """Three-digit figures of our own measurements, as they are written: .649, +.037."""
    return set(re.findall(r"(?<![\d\w])\.\d{3}(?!\d)", text))


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_are_read_by_the_commands_themselves(path, capsys):
    found = [(" ".join(words), wrong_with(words)) for words in commands(path.read_text())]
    own = re.findall(r"^def (\w+)", path.read_text(), flags=re.MULTILINE)  # an objective that the page adds
    assert [f"{command}: {wrong}" for command, wrong in found if wrong and not set(own) & set(command.split())] == []


@pytest.mark.parametrize("path", [p for p in PAGES if name_of(p) not in MEASURED], ids=name_of)
def test_a_page_installs_the_extras_that_its_commands_need(path):
    text = path.read_text()
    installed = {
        extra for listed in re.findall(r"pip install [^`\n]*?\[([\w,]+)\]", text) for extra in listed.split(",")
    }
    lacking = {" ".join(words): extras_for(words) - installed for words in commands(text)}
    assert {command: extras for command, extras in lacking.items() if extras} == {}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_keys_files_and_metrics_exist(path):
    assert list(wrong_spans(path.read_text())) == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_tables_of_keys_show_the_defaults(path):
    assert list(wrong_defaults(path.read_text(), SftConfig if path.name == "sft.md" else Config)) == []


@pytest.mark.parametrize("path", [p for p in PAGES if "adapters" not in p.parts], ids=name_of)
def test_code_names_what_exists(path):
    assert list(wrong_code(path.read_text())) == []


@pytest.mark.parametrize("path", [p for p in PAGES if name_of(p) not in MEASURED], ids=name_of)
def test_figures_of_the_study_are_those_of_the_results(path):
    measured = set().union(*(figures((ROOT / page).read_text()) for page in MEASURED))
    assert figures(path.read_text()) - measured == set()


@pytest.mark.parametrize("page", PINNED)
def test_an_adapter_was_tested_with_the_version_that_is_pinned(page):
    file, package = PINNED[page]
    (version,) = re.findall(rf"^{package}==(\S+)$", (ROOT / file).read_text(), flags=re.MULTILINE)
    assert version in (ROOT / "docs/adapters" / f"{page}.md").read_text().partition("## Versions")[2]


def test_the_page_of_trouble_has_every_exit_code():
    listed = re.findall(r"^    (\d+) ", errors.__doc__, flags=re.MULTILINE)
    page = (ROOT / "docs/trouble.md").read_text().partition("## Exit codes")[2]
    assert listed == re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)


def test_the_page_of_diagnose_shows_what_the_command_prints(tmp_path, capsys):
    made = script(ROOT / "examples/make_dump.py", tmp_path / "dumps", "--names", "verl")
    assert made.returncode == 0, made.stderr
    assert run(["diagnose", str(tmp_path / "dumps")]) == 0
    printed = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs/diagnose.md").read_text().partition("The example begins")[2].partition("| section |")[0]
    shown = [line.removeprefix("    ") for line in page.splitlines() if line.startswith("    ")]
    assert len(shown) > 20
    assert [line for line in shown if line not in printed] == []


def test_nothing_says_that_bapo_is_on_pypi():
    given = re.compile(r"pip install (?:-\S+ )*['\"]?bapo(?=['\"\s`]|\[)")
    assert [name_of(path) for path in OTHER_FILES if path.is_file() and given.search(path.read_text())] == []


def test_what_does_not_exist_is_found(capsys):
    page = """
`bapo train --learn.lrr 1` and `bapo train paper_8b`, `learn.lrr`, `tests/unit/test_nothing.py`, `rollout/nothing`

    bapo compare nothing && bapo report --nothing RUN
    python tools/memory.py --nothing
    make nothing
    pip install -c constraints/base.txt '.[nothing]'
    pip install bapo
    bapo train --offpolicy.reuse 40

```python
from bapo import nothing
```

| key | default | |
|---|---|---|
| `learn.lr` | 1e-6 | |
"""
    (several,) = commands("`torchrun --nproc-per-node 8 -m bapo train paper_7b --model.lora.rank 8`")
    assert extras_for(several) == {"data", "math", "lora"}
    wrong = [wrong_with(words) for words in commands(page)]
    assert len(wrong) == 9
    assert None not in wrong
    assert len(list(wrong_spans(page))) == 3
    assert list(wrong_code(page)) == ["bapo has no nothing"]
    assert list(wrong_defaults(page, Config)) == ["learn.lr: 3e-05, not 1e-6"]
