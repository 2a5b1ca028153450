"""`bapo eval` on the shipped model: figures, interruption, refusals, exit codes."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bapo.cli import run
from bapo.config.command_line import parse_arguments
from bapo.config.errors import ConfigError
from bapo.config.recipe import parse
from bapo.config.run import Config
from bapo.evaluate import Arguments, evaluate, maj_at_k
from bapo.evaluate.evaluation import fingerprint_of_weights, load_data_sets
from bapo.evaluate.options import Settings, data_names
from bapo.models.loading import load_policy
from bapo.preflight.examine import load_task
from bapo.rollout.engine import Sampling
from bapo.rollout.local.engine import LocalEngine
from bapo.tasks.countdown import Countdown
from bapo.train.card import eval_command
from tests.processes import PATIENCE, bapo, started

FILES = ("config.json", "responses.jsonl", "chunks.jsonl", "results.json", "report.html")
ARGUMENTS = [
    *("eval", "--model", "demo", "--data", "countdown", "--k", "4", "--problems", "10", "--chunk", "4"),
    *("--threads", "1", "--device", "cpu"),
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A complete evaluation: its directory."""
    out = tmp_path_factory.mktemp("eval") / "whole"
    assert run([*ARGUMENTS, "--out", str(out)]) == 0
    return out


def rows_of(out):
    return [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]


def contents(out):
    return {name: (out / name).read_bytes() for name in FILES}


def test_the_figures_are_those_of_evaluate(whole):
    results = json.loads((whole / "results.json").read_text())
    policy = load_policy("demo", dtype="float32", device="cpu")
    task = Countdown()
    engine = LocalEngine(policy.model)
    engine.load(policy.model.named_parameters(), version=0)
    expected = evaluate(
        engine,
        policy,
        task.scores,
        task.test[:10],
        k=4,
        sampling=Sampling(0.6, policy.stop_ids),
        max_tokens=64,
        seed=0,
    )
    found = results["data_sets"]["countdown"]
    assert (found["problems"], found["responses"], results["k"], results["temperature"]) == (10, 40, 4, 0.6)
    assert found["avg"] == vars(expected.avg)
    assert found["pass_k"] == found["pass"]["4"] == vars(expected.pass_k)
    assert list(found["pass"]) == ["1", "2", "4"]
    assert found["pass"]["1"]["value"] == pytest.approx(found["avg"]["value"])
    assert found["truncated"]["value"] == pytest.approx(expected.truncated)
    assert found["length"] == pytest.approx(expected.length)
    assert found["length_wrong"] == pytest.approx(expected.length_wrong)
    assert found["entropy"] == pytest.approx(expected.entropy, rel=1e-5)
    assert found["maj"] is None  # countdown names no answers
    assert results["overall"] == found
    assert [line["avg"] for line in results["problem_table"]] == [sum(row) / 4 for row in expected.rewards]
    assert results["max_tokens"] == 64
    assert set(results["versions"]) >= {"bapo", "torch", "transformers"}


def test_every_response_is_kept(whole):
    rows = rows_of(whole)
    assert [row["id"] for row in rows] == [problem.id for problem in Countdown().test[:10]]
    assert all(len(row["responses"]) == 4 for row in rows)
    first = rows[0]
    assert first["data"] == "countdown"
    assert first["prompt"] == Countdown().test[0].prompt
    assert first["reference"] == Countdown().test[0].answer
    assert set(first["responses"][0]) == {"text", "tokens", "status", "reward", "failure", "answer", "entropy"}


@pytest.mark.parametrize("kept", [0, 1, 700, 0.35, 0.5, 0.93])
def test_what_was_cut_off_anywhere_is_made_again_with_the_same_bytes(whole, tmp_path, kept):
    out = tmp_path / "cut"
    out.mkdir()
    for name in ("config.json", "chunks.jsonl"):
        (out / name).write_bytes((whole / name).read_bytes())
    responses = (whole / "responses.jsonl").read_bytes()
    (out / "responses.jsonl").write_bytes(responses[: int(kept * len(responses)) if isinstance(kept, float) else kept])
    assert run([*ARGUMENTS, "--out", str(out)]) == 0
    assert contents(out) == contents(whole)


def test_ctrl_c_says_how_to_continue_and_nothing_is_lost(whole, tmp_path):
    out = tmp_path / "stopped"
    said = tmp_path / "said.txt"
    process = started(*ARGUMENTS, "--out", out, log=tmp_path / "log.txt", errors=said)
    deadline = time.monotonic() + 120
    responses = out / "responses.jsonl"
    while not (responses.exists() and responses.stat().st_size) and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGINT)
    process.join(PATIENCE)
    errors = said.read_text()
    assert process.exitcode == 130, errors
    assert "bapo eval --model demo --data countdown --k 4" in errors
    assert f"--out {out}" in errors
    assert "Traceback" not in errors
    assert not (out / "results.json").exists()
    saved = len(rows_of(out))
    assert saved in (4, 8)

    again = bapo(*ARGUMENTS, "--out", out)
    assert again.returncode == 0, again.stderr
    assert f"{saved} of 10 problems were already done" in again.stdout
    assert contents(out) == contents(whole)


def test_a_complete_evaluation_is_shown_again_without_sampling(whole, capsys):
    before = contents(whole)
    assert run([*ARGUMENTS, "--out", str(whole)]) == 0
    output = capsys.readouterr().out
    assert "10 of 10 problems were already done" in output
    assert "eta" not in output
    assert "pass@4" in output
    assert contents(whole) == before


def test_chunks_and_slots_do_not_change_what_is_said(whole, tmp_path):
    out = tmp_path / "other"
    assert run([*ARGUMENTS, "--chunk", "3", "--slots", "5", "--out", str(out)]) == 0

    def texts(path):
        return [[response["text"] for response in row["responses"]] for row in rows_of(path)]

    assert texts(out) == texts(whole)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--k", "2"], "k=4, but this one has 2"),
        (["--seed", "1"], "seed=0, but this one has 1"),
        (["--temperature", "1"], "temperature=0.6, but this one has 1.0"),
        (["--problems", "9"], "problems=10, but this one has 9"),
        (["--top-p", "0.9"], "top_p=None, but this one has 0.9"),
        (["--slots", "7"], "slots=128, but this one has 7: another number of slots may round differently"),
    ],
)
def test_another_configuration_is_refused_by_its_key(whole, capsys, changed, message):
    before = contents(whole)
    assert run([*ARGUMENTS, *changed, "--out", str(whole)]) == 2
    assert message in capsys.readouterr().err
    assert contents(whole) == before


def test_other_weights_under_the_same_name_are_refused(tmp_path, capsys):
    model = tmp_path / "model"
    policy = load_policy("demo", dtype="float32", device="cpu")
    policy.model.save_pretrained(model)
    policy.tokenizer.save_pretrained(model)
    assert fingerprint_of_weights(policy.model) == fingerprint_of_weights(
        load_policy(str(model), dtype="float32", device="cpu").model
    )
    arguments = [
        "eval",
        "--model",
        str(model),
        "--data",
        "countdown",
        "--k",
        "1",
        "--problems",
        "2",
        "--max-tokens",
        "8",
    ]
    arguments += ["--threads", "1", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert run(arguments) == 0
    with torch.no_grad():
        policy.model.lm_head.weight += 1e-4
    policy.model.save_pretrained(model)
    assert run(arguments) == 2
    assert "the model's weights have changed" in capsys.readouterr().err


def test_the_fingerprint_sees_every_value_of_every_weight():
    model = load_policy("demo", dtype="float32", device="cpu").model
    seen = {fingerprint_of_weights(model)}
    weight = max(model.parameters(), key=torch.numel).detach().flatten()
    places = [1, weight.numel() // 2 + 1, weight.numel() - 1]
    for place in places:
        weight[place] = torch.nextafter(weight[place], torch.tensor(9.0))
        seen.add(fingerprint_of_weights(model))
    weight[places[0]], weight[places[1]] = weight[places[1]].item(), weight[places[0]].item()
    seen.add(fingerprint_of_weights(model))
    assert len(seen) == 5
    assert fingerprint_of_weights(model) == fingerprint_of_weights(model) in seen


def test_the_same_command_finds_its_directory_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["eval", "--model", "demo", "--data", "countdown", "--k", "2", "--problems", "2", "--threads", "1"]
    assert run(arguments) == 0
    assert run(arguments) == 0
    assert "2 of 2 problems were already done" in capsys.readouterr().out
    assert run([*arguments, "--seed", "5"]) == 0
    assert len(list((tmp_path / "evals").glob("demo-*"))) == 2


def test_more_problems_than_there_are_is_said(tmp_path, capsys):
    data = tmp_path / "two.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    arguments = ["eval", "--model", "demo", "--data", f"two={data}", "--k", "1", "--max-tokens", "2", "--threads", "1"]
    assert run([*arguments, "--problems", "3", "--out", str(tmp_path / "three")]) == 0
    assert "two: has 2 problems, fewer than --problems 3" in capsys.readouterr().out
    assert run([*arguments, "--problems", "2", "--out", str(tmp_path / "two")]) == 0
    assert "fewer than" not in capsys.readouterr().out


def test_greedy_takes_one_response(tmp_path, capsys):
    out = tmp_path / "greedy"
    arguments = ["eval", "--model", "demo", "--data", "countdown", "--problems", "3", "--threads", "1"]
    assert run([*arguments, "--temperature", "0", "--out", str(out)]) == 0
    assert [len(row["responses"]) for row in rows_of(out)] == [1, 1, 1]
    assert json.loads((out / "results.json").read_text())["k"] == 1
    capsys.readouterr()
    assert run([*arguments, "--temperature", "0", "--k", "4", "--out", str(out)]) == 2
    assert "--temperature 0 is greedy: it takes the likeliest token" in capsys.readouterr().err
    assert run([*arguments, "--temperature", "0", "--top-p", "0.9", "--out", str(out)]) == 2
    assert "Leave out --top-p, --top-k and --min-p" in capsys.readouterr().err


def test_truncation_that_leaves_only_the_likeliest_token_is_greedy(tmp_path, capsys):
    arguments = ["eval", "--model", "demo", "--data", "countdown", "--problems", "2", "--threads", "1", "--k", "1"]
    assert run([*arguments, "--temperature", "0", "--out", str(tmp_path / "greedy")]) == 0
    assert run([*arguments, "--top-k", "1", "--out", str(tmp_path / "cut")]) == 0
    assert "temperature 0.6, top-k 1" in capsys.readouterr().out
    greedy, cut = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("greedy", "cut"))
    assert "top_k" not in greedy
    assert cut["top_k"] == 1
    assert rows_of(tmp_path / "greedy") == rows_of(tmp_path / "cut")


def test_a_damaged_directory_is_not_continued(whole, tmp_path, capsys):
    out = tmp_path / "damaged"
    out.mkdir()
    (out / "config.json").write_bytes((whole / "config.json").read_bytes())
    lines = (whole / "responses.jsonl").read_bytes().splitlines(keepends=True)
    for spoiled, message in (
        ([lines[0], b"{\n", *lines[1:]], "line 2 is damaged"),
        ([lines[1], lines[0]], "line 1: expected problem"),
    ):
        (out / "responses.jsonl").write_bytes(b"".join(spoiled))
        assert run([*ARGUMENTS, "--out", str(out)]) == 3
        assert message in capsys.readouterr().err
        assert (out / "responses.jsonl").read_bytes() == b"".join(spoiled)
    (out / "config.json").write_text("{")
    assert run([*ARGUMENTS, "--out", str(out)]) == 3


def test_a_saved_response_that_somebody_changed_is_noticed(whole, tmp_path, capsys):
    out = shutil.copytree(whole, tmp_path / "changed")
    lines = (whole / "responses.jsonl").read_bytes().splitlines(keepends=True)
    changed = [*lines[:5], lines[5].replace(b'"reward": 0.0', b'"reward": 1.0'), *lines[6:]]
    assert changed != lines
    (out / "responses.jsonl").write_bytes(b"".join(changed))
    assert run([*ARGUMENTS, "--out", str(out)]) == 3
    assert "the chunk that begins in line 5 is not as it was written" in capsys.readouterr().err
    (out / "responses.jsonl").write_bytes(b"".join(lines[:4]))  # as the message advises
    assert run([*ARGUMENTS, "--out", str(out)]) == 0
    assert contents(out) == contents(whole)
    shorter = json.loads(lines[-1])
    del shorter["source"]
    (out / "responses.jsonl").write_bytes(b"".join([*lines[:-1], json.dumps(shorter).encode() + b"\n"]))
    assert run([*ARGUMENTS, "--out", str(out)]) == 0  # a chunk that was cut is sampled again
    assert contents(out) == contents(whole)


def test_saved_rows_of_another_form_are_refused_with_words(whole, tmp_path, capsys):
    out = shutil.copytree(whole, tmp_path / "edited")
    (out / "chunks.jsonl").unlink()
    lines = (whole / "responses.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[1])
    response = row["responses"][0]
    spoiled = [row | {"responses": value} for value in ("x", [], [1], None, {})]
    spoiled += [{key: value for key, value in row.items() if key != left} for left in ("responses", "source", "prompt")]
    spoiled += [
        row | {"responses": [response | {key: value}]}
        for key, values in {
            "reward": ("x", 10**400, float("nan"), True, 1.7e308, -1e101),
            "tokens": ("x", 10**400, -1),
            "answer": ([],),
            "failure": ({},),
            "entropy": (float("inf"),),
            "text": (3,),
            "status": ("dropped",),
        }.items()
        for value in values
    ]
    spoiled += [row | {"responses": row["responses"][:3]}, row | {"responses": [response] * 5}]
    for each in [*spoiled, [], 3]:
        (out / "responses.jsonl").write_text("".join([lines[0], json.dumps(each) + "\n", *lines[2:]]))
        assert run([*ARGUMENTS, "--out", str(out)]) == 3, each
        assert "responses.jsonl, line 2 is damaged: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--help"], 0, "--temperature"),
        ([], 2, "--model"),
        (["--model", "demo", "--data", ","], 2, "names no data set"),
        (["--model", "demo", "--data", "countdown", "--k", "0"], 2, "--k 0: it must be 1 or more"),
        (["--model", "demo", "--data", "countdown", "--temperature", "-1"], 2, "--temperature -1.0"),
        (
            ["--model", "demo", "--data", "countdown", "--top-p", "0"],
            2,
            "--top-p 0.0: it must be a share above 0. 1",
        ),
        (["--model", "demo", "--data", "countdown", "--top-k", "-1"], 2, "--top-k -1: it must be 0 or more. 0 leaves"),
        (["--model", "demo", "--data", "countdown", "--reward", "maths"], 2, "neither math nor module:function"),
        (
            ["--model", "demo", "--data", "countdown", "--reward", "math,judge"],
            2,
            "--reward judge: `bapo eval` asks no",
        ),
        (["--model", "demo", "--data", "countdown", "--reward-weights", "1"], 2, "1 weights for 0 rewards"),
        (["--model", "demo", "--data", "countdown,countdown"], 2, "two data sets called 'countdown'"),
        (
            ["--model", "demo", "--data", "countdown,overall=mine.jsonl"],
            2,
            "a data set called 'overall', but the results use that name",
        ),
        (["--model", "demo", "--data", "nowhere.jsonl"], 2, "'nowhere.jsonl' does not exist"),
        (["--model", "/nowhere", "--data", "countdown"], 2, "model.path='/nowhere' cannot be loaded"),
        (["--model", "demo", "--data", "countdown", "--max-tokens", "400"], 2, "Set --max-tokens 1"),
        (["--model", "demo", "--data", "countdown", "--chat-option", "x"], 2, "KEY=VALUE"),
        (["--model", "demo", "--data", "countdown", "--out", "/proc/nowhere"], 2, "Choose another place"),
        (["--model", "demo", "--data", "countdown", "--out", "."], 2, "so it is not an evaluation"),
    ],
)
def test_usage_and_exit_codes(arguments, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "something").write_text("of mine")
    (tmp_path / "mine.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    assert run(["eval", *arguments]) == code
    output = capsys.readouterr()
    assert message in output.out + output.err


def test_a_training_run_is_not_taken_for_an_evaluation(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"seed": 0, "model": {"path": "demo"}}')
    assert run([*ARGUMENTS, "--out", str(tmp_path)]) == 2
    assert "does not describe an evaluation by this version" in capsys.readouterr().err


def test_names_of_data_sets(tmp_path, monkeypatch):
    assert data_names(["a, b", "c"]) == ("a", "b", "c")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x,y.jsonl").touch()
    assert data_names(["x,y.jsonl", "z=x,y.jsonl", "a,b"]) == ("x,y.jsonl", "z=x,y.jsonl", "a", "b")
    (tmp_path / "two.jsonl").touch()
    assert data_names(["countdown,two=two.jsonl"]) == ("countdown", "two=two.jsonl")


def test_a_chunk_fills_the_slots():
    assert Settings("m", ("d",), k=16, slots=128).chunk_problems == 32
    assert Settings("m", ("d",), k=1000, slots=1).chunk_problems == 1
    assert Settings("m", ("d",), chunk=5).chunk_problems == 5
    with pytest.raises(ConfigError, match="--slots 0"):
        Settings("m", ("d",), slots=0)


def test_the_command_that_a_run_ends_with_evaluates_the_problems_that_it_held_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, numbers in (("a", range(30)), ("b", range(25, 60))):
        rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in numbers]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for sources in (["a.jsonl"], ["a.jsonl", "b.jsonl"]):
        config = parse(Config, {"task": {"train": sources, "holdout": 0.1}}, source="test")
        held_out = load_task(config.task).test
        command = shlex.split(eval_command(config, "model", chat=False))[2:]
        found = load_data_sets(parse_arguments(Arguments, command, prog="bapo eval").settings)
        assert {problem.id for data in found for problem in data.problems} == {problem.id for problem in held_out}
        assert len(held_out) == (3 if len(sources) == 1 else 6)
    whole = load_data_sets(Settings("m", ("countdown",), holdout=0.5))  # it is held out already
    assert len(whole[0].problems) == 512
    with pytest.raises(ConfigError, match=r"--holdout 1.0: it must be a share"):
        Settings("m", ("d",), holdout=1.0)
    Path("one.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    with pytest.raises(ValueError, match="--holdout holds out no problem of 'one'"):
        load_data_sets(Settings("m", ("one.jsonl",), holdout=0.5))


def test_problems_of_a_file_are_put_and_named(tmp_path, capsys):
    """A file of countdown problems with two rewards of one's own, beside the embedded ones."""
    problems = [{"question": p.prompt, "answer": str(p.answer["target"])} for p in Countdown().train[:3]]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (tmp_path / "my_rewards.py").write_text(
        "def score(response, answer):\n    return float(response.endswith(f'={answer}.'))\n"
        "def length(completions, **columns):\n    return [len(one) for one in completions]\n"
    )
    out = tmp_path / "out"
    command = [
        *("eval", "--model", "demo", "--data", f"own={file},countdown"),
        *("--problems", "2", "--k", "2", "--threads", "1", "--out", str(out)),
        *("--reward", "my_rewards:score,my_rewards:length", "--reward-weights", "2", "-0.125"),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = bapo(*command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    rows = rows_of(out)
    assert [row["data"] for row in rows] == ["own", "own", "countdown", "countdown"]
    for row in rows[:2]:
        for response in row["responses"]:
            right = response["text"].endswith(f"={row['reference']}.")
            assert response["reward"] == 2 * right - 0.125 * len(response["text"])
    results = json.loads((out / "results.json").read_text())
    assert results["overall"]["problems"] == 4
    values = [results["data_sets"][name]["avg"]["value"] for name in ("own", "countdown")]
    assert results["mean_over_data_sets"]["avg"] == pytest.approx(sum(values) / 2)
    assert "overall" in done.stdout

    file.write_text(file.read_text().replace('"answer": "', '"answer": "1'))
    again = bapo(*command, cwd=tmp_path, env=environment)
    assert again.returncode == 2
    assert "fingerprints.own" in again.stderr
    assert "its problems, or the prompts made of them, have changed" in again.stderr


def test_answers_are_verified_and_vote(tmp_path, capsys):
    """The real verifier: the last number of a chain is its answer, and the target is the reference."""
    problems = [{"question": p.prompt, "answer": str(p.answer["target"])} for p in Countdown().test[:6]]
    file = tmp_path / "targets.jsonl"
    file.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    arguments = ["eval", "--model", "demo", "--data", str(file), "--k", "5", "--threads", "1", "--device", "cpu"]
    assert run([*arguments, "--out", str(tmp_path / "out")]) == 0
    rows = rows_of(tmp_path / "out")
    assert [row["data"] for row in rows] == ["targets"] * 6
    finished = [
        (row["reference"], response)
        for row in rows
        for response in row["responses"]
        if re.fullmatch(r".*=\d+\.", response["text"])
    ]
    assert len(finished) > 5
    for reference, response in finished:
        said = response["text"].rpartition("=")[2].rstrip(".")
        assert response["answer"] == said
        assert response["reward"] == float(said == reference)
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    rewards = [[response["reward"] for response in row["responses"]] for row in rows]
    answers = [[response["answer"] for response in row["responses"]] for row in rows]
    assert found["overall"]["maj"] == vars(maj_at_k(rewards, answers))
    assert found["overall"]["failures"] == 0
    assert "math_verify" in found["versions"]


def test_help_imports_no_torch():
    code = "import sys; from bapo.cli import run; run(['eval', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
