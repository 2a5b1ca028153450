"""One place prints, and nothing that strangers write can move the cursor."""

import ast
import io
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from rich.live import Live
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

import bapo
from bapo import cli
from bapo.process import stops
from bapo.screen.terminal import Visible, make_console, printable, say, visible, write_line
from bapo.screen.view import make_view, summary_table

PACKAGE = Path(bapo.__file__).parent
PRINTS = {"screen/terminal.py"}
EVIL = "a\x1b[2J\x1b]0;title\x07b\x9bc\u202ed\re"


def told(node):
    """What a call does that only one module may do; empty if nothing."""
    name = ast.unparse(node.func)
    if name in ("print", "rich.print", "Console", "get_console", "pprint", "traceback.print_exc"):
        return name
    if name.rpartition(".")[2] in ("write", "writelines") and name.rpartition(".")[0].rpartition(".")[2] in (
        *("stdout", "stderr", "stream", "__stdout__", "__stderr__"),
    ):
        return name
    draws = name in ("Live", "Progress", "_Bar", "SteadyLive")
    return f"{name} without a console" if draws and "console" not in ast.unparse(node) else ""


def test_one_module_prints():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if str(path.relative_to(PACKAGE)) in PRINTS:
            continue
        tree = ast.parse(path.read_text())
        tools = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "__name__ == '__main__'"]
        inside = {inner for tool in tools for inner in ast.walk(tool)}
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and n not in inside]
        found += [f"{path.relative_to(PACKAGE)}:{call.lineno} {what}" for call in calls if (what := told(call))]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["print('x')", "sys.stdout.write('x')", "self.stream.write('x')", "Console(file=f)", "Live()", "rich.print(1)"],
)
def test_the_search_finds_what_it_looks_for(line):
    assert told(ast.parse(line).body[0].value)
    assert not told(ast.parse("file.write(data)").body[0].value)


def assert_tame(text):
    assert not [letter for letter in text if letter not in "\n" and not letter.isprintable()], repr(text)
    assert "a·[2J·]0;title·b·c·d" in text


def test_every_way_to_print_shows_control_characters(capsys):
    say(EVIL)
    say(EVIL, error=True)
    write_line(sys.stdout, EVIL)
    out, err = capsys.readouterr()
    assert_tame(out)
    assert_tame(err)
    assert visible(EVIL) == printable(EVIL, newline="·")
    assert visible("Grüße, 世界\n") == "Grüße, 世界\n"
    stream = io.StringIO()
    view = make_view(2, title=EVIL, stream=stream, plain=True)
    with view:
        view.note(EVIL)
        view.sample(EVIL, EVIL, 1.0)
    assert_tame(stream.getvalue())
    summary_table(EVIL, [(EVIL, "1", "2")])
    assert_tame(capsys.readouterr().out)


def test_what_rich_draws_shows_control_characters_and_keeps_its_own():
    stream = io.StringIO()
    console = make_console(stream, width=80)
    table = Table(title=EVIL)
    table.add_column(Text(EVIL))
    table.add_row(EVIL)
    console.print(Text(EVIL, "bold"), EVIL, table)
    with Progress(TextColumn("{task.description}", markup=False), console=console) as progress:
        progress.add_task(EVIL, total=1)
    with Live(Text(EVIL), console=console):
        pass
    drawn = stream.getvalue()
    for sequence in ("\x1b[2J", "\x1b]0;", "\x07", "\x9b", "\u202e"):
        assert sequence not in drawn
    assert "\x1b[1m" in drawn  # bold
    assert "\x1b[?25l" in drawn  # the cursor, hidden by rich itself
    assert drawn.count("a·[2J·]0;title") >= 5  # rich itself leaves out the bell


def test_what_libraries_write_to_standard_error_keeps_only_colours(monkeypatch, capsys):
    monkeypatch.setattr(cli, "run", lambda words: say(EVIL) or warn())

    def warn():
        sys.stderr.write(warnings.formatwarning(EVIL, UserWarning, "file.py", 1, line=""))
        sys.stderr.writelines(["\x1b[31mred\x1b[0m ", EVIL])
        return 0

    monkeypatch.setattr(stops, "watch", lambda: None)  # it would follow the signals of other tests, too
    monkeypatch.setattr(sys, "stderr", before := sys.stderr)
    with pytest.raises(SystemExit):
        cli.main(["x"])
    assert isinstance(sys.stderr, Visible)
    assert sys.stderr.isatty() == before.isatty()
    err = capsys.readouterr().err
    assert "\x1b[31mred\x1b[0m" in err
    assert_tame(err.replace("\x1b[31m", "").replace("\x1b[0m", ""))
    assert err.count("a·[2J") >= 2


def broken_model(tmp_path, **changed):
    import shutil

    model = shutil.copytree(PACKAGE / "demo/model", tmp_path / "model")
    (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | changed))
    return model


def hostile_commands(tmp_path):
    """Commands whose output tells something that a stranger wrote."""
    evil = f"{EVIL}\nbapo: fake"
    name = tmp_path / evil
    name.mkdir()
    (name / "config.json").write_text(json.dumps({evil: 1}))
    yield "a name of a directory, and a key of config.json", ["report", str(name)]
    yield "resumed", ["resume", str(name)]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"{json.dumps(evil)} = 1\n")
    yield "a key of a recipe", ["train", str(recipe)]
    (tmp_path / "default.toml").write_text(f"model.path = {json.dumps(evil)}\n")
    yield "a value in --help", ["train", str(tmp_path / "default.toml"), "--help"]
    values = np.full((2, 3), -1.0, dtype=np.float32)
    np.savez(tmp_path / "a.npz", **{evil: values, "logprobs": values})
    yield "a column of npz", ["diagnose", str(tmp_path / "a.npz")]
    (tmp_path / "data.jsonl").write_text(json.dumps({evil: "1", "b": "2"}) + "\n")
    yield (
        "a column of data",
        ["eval", "--model", "demo", "--data", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "e")],
    )
    model = broken_model(tmp_path, model_type=evil)
    yield "model_type", ["eval", "--model", str(model), "--data", "countdown", "--out", str(tmp_path / "e")]


def test_commands_show_control_characters_of_strangers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for what, words in hostile_commands(tmp_path):
        cli.run(words)
        text = "".join(capsys.readouterr())
        bad = {letter for letter in text.replace("\n", "") if not letter.isprintable()}
        assert not bad, (what, bad, text)
        assert "[2J" in text, (what, text)  # it was told
        assert "\nbapo: fake" not in text, (what, text)


def test_an_error_of_a_reward_function_and_of_a_template_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil_rewards.py").write_text(f"def score(prompt, response, answer):\n    raise ValueError({EVIL!r})\n")
    same = ["--data", "countdown", "--problems", "1", "--k", "1", "--max-tokens", "4"]
    cli.run(["eval", "--model", "demo", *same, "--reward", "evil_rewards:score", "--out", "one"])
    model = broken_model(tmp_path)
    (model / "chat_template.jinja").write_text(f"{{{{ raise_exception({json.dumps(EVIL)}) }}}}")
    cli.run(["eval", "--model", str(model), *same, "--out", "two"])
    out, err = capsys.readouterr()
    assert_tame(err)
    assert "\x1b" not in out
    assert "[2J" in out
    found = json.loads((tmp_path / "one/results.json").read_text())  # for machines: as it was
    assert "\x1b[2J" in next(iter(found["overall"]["failure_causes"]))


def test_json_for_machines_is_exact(capsys):
    from bapo.commands.completion import schema_of

    assert cli.run(["schema"]) == 0
    assert capsys.readouterr().out == json.dumps(schema_of("train"), indent=2) + "\n"


def test_colours_of_libraries_are_kept_and_what_hides_a_text_is_not():
    stream = io.StringIO()
    kept = "\x1b[1;31mred\x1b[0m \x1b[2mdim\x1b[22m \x1b[38;5;208morange\x1b[m \x1b[97;104mbright\x1b[39;49m"
    Visible(stream).write(kept)
    assert stream.getvalue() == kept
    for hiding in ("8", "1;8", "28;8", "7;8;1", "08", "5", "38;2;0;0;0", "38;5"):
        stream = io.StringIO()
        Visible(stream).write(f"\x1b[{hiding}mhidden")
        assert stream.getvalue() == f"·[{hiding}mhidden"
