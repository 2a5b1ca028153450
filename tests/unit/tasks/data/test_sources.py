"""What data sources may be called, and where each name leads. The hub itself is never asked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bapo.tasks.data.problems import load_problems
from bapo.tasks.data.rows import hub_rows, read_rows
from bapo.tasks.data.sources import BENCHMARKS, BOXED, resolve

REAL = Path(__file__).parents[3] / "data" / "problems"


@pytest.fixture(autouse=True)
def _no_data_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("BAPO_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def write(path, *prompts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    return path


def prompts(*sources, **options):
    return [problem.prompt for problem in load_problems(sources, **options)[0]]


@pytest.mark.parametrize(
    ("name", "hub", "config", "split"),
    [
        ("owner/name", "owner/name", None, None),
        ("owner/na.me-1:math", "owner/na.me-1", None, "math"),
        ("owner/name:main:test", "owner/name", "main", "test"),
        ("owner/name:main:", "owner/name", "main", None),
        ("mine=owner/name:x", "owner/name", None, "x"),
        ("gsm8k", "openai/gsm8k", "main", "test"),
        ("gsm8k:train", "openai/gsm8k", "main", "train"),
        ("aime24", "HuggingFaceH4/aime_2024", None, "train"),
    ],
)
def test_names_of_the_hub(name, hub, config, split):
    source = resolve(name)
    assert (source.hub, source.config, source.split, source.files) == (hub, config, split, ())


def test_every_benchmark_asks_for_a_box():
    for name, benchmark in BENCHMARKS.items():
        assert resolve(name) == benchmark
        assert (benchmark.label, benchmark.named, benchmark.template) == (name, True, "{prompt} " + BOXED)


@pytest.mark.parametrize(
    "name", ["absent.jsonl", "data/absent.jsonl", "/absent/dir", "aime26", "a/b/c", "x=absent", ""]
)
def test_what_leads_nowhere_is_refused(name):
    with pytest.raises(ValueError, match=r"does not exist.*not a benchmark \(gsm8k, math500, aime24, aime25\)"):
        resolve(name)


@pytest.mark.parametrize("name", ["~no_such_user/x.jsonl", "~no_such_user/x:train", "mine=~no_such_user/x.jsonl"])
def test_a_home_that_does_not_exist_is_refused(name):
    with pytest.raises(
        ValueError, match=r"data source '~no_such_user/x.* home directory\. Give .* put \./ before a name"
    ):
        resolve(name)


def test_a_benchmark_is_found_in_the_data_directory(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in (REAL / "aime.jsonl").read_text().splitlines()]
    (tmp_path / "all" / "aime24").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "all" / "aime24" / "skywork_aime24.parquet")
    write(tmp_path / "all" / "gsm8k" / "train.jsonl", "trained")
    write(tmp_path / "all" / "gsm8k" / "test.jsonl", "tested")
    (tmp_path / "all" / "gsm8k" / "LICENSE").write_text("MIT")
    monkeypatch.setenv("BAPO_DATA", str(tmp_path / "all"))

    problems, _ = load_problems(["aime24"])
    assert {problem.source for problem in problems} == {"aime24"}
    assert problems[2].extra["data_source"] == "test-math-aime25"
    texts = [problem.prompt[0]["content"] for problem in problems]
    assert all(text.endswith(BOXED) and text.count(BOXED) == 1 for text in texts)  # only the last came without it
    assert prompts("gsm8k") == [f"tested {BOXED}"]
    assert prompts("gsm8k:train") == [f"trained {BOXED}"]
    assert prompts("gsm8k:train", template="{prompt}") == ["trained"]
    with pytest.raises(ValueError, match=r"has no split 'dev'\. It holds 'test', 'train'"):
        resolve("gsm8k:dev")
    (tmp_path / "all" / "gsm8k" / "test.jsonl").unlink()
    with pytest.raises(ValueError, match=r"has no split 'test'\. It holds 'train'"):
        resolve("gsm8k")
    assert resolve("math500").hub == "HuggingFaceH4/MATH-500"
    monkeypatch.setenv("BAPO_DATA", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"BAPO_DATA=.* is not a directory"):
        resolve("gsm8k")


def test_a_path_may_be_given_a_name(tmp_path):
    path = write(tmp_path / "x" / "my=file.jsonl", "p")
    named, other = load_problems([f"aime24={path}"])[0][0], load_problems([f"mine={path}"])[0][0]
    assert (named.source, named.prompt) == ("aime24", f"p {BOXED}")
    assert (other.source, other.prompt) == ("mine", "p")
    assert load_problems([str(path)])[0][0].source == "my=file"


def test_a_directory_is_read_whole_unless_it_has_splits(tmp_path):
    write(tmp_path / "plain" / "b.jsonl", "b")
    write(tmp_path / "plain" / "a.jsonl", "a", "b")
    write(tmp_path / "plain" / ".cache" / "c.jsonl", "hidden")
    (tmp_path / "plain" / "dataset_info.json").write_text("{}")
    assert prompts("plain") == ["a", "b"]

    write(tmp_path / "split" / "train-00000-of-00002.jsonl", "t0")
    write(tmp_path / "split" / "train-00001-of-00002.jsonl", "t1")
    write(tmp_path / "split" / "test" / "0000.jsonl", "e")
    write(tmp_path / "split" / "math_test.jsonl", "m")
    assert prompts("split:train") == ["t0", "t1"]
    assert prompts(f"{tmp_path}/split:test") == ["e"]
    with pytest.raises(ValueError, match=r"several splits: 'test', 'train', math_test.jsonl \(in no split\)"):
        resolve("split")
    write(tmp_path / "skywork" / "data" / "math-00000-of-00001.jsonl", "sum")
    write(tmp_path / "skywork" / "data" / "code-00000-of-00001.jsonl", "program")
    assert prompts("skywork:math") == ["sum"]
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="It holds: nothing"):
        resolve("none")


def test_a_directory_called_like_a_benchmark_does_not_shadow_it(tmp_path):
    write(tmp_path / "gsm8k" / "test.jsonl", "mine")
    assert resolve("gsm8k").hub == "openai/gsm8k"
    assert prompts("./gsm8k") == ["mine"]


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k:train", "openai/gsm8k:main:test"])
def test_a_directory_called_like_a_data_set_of_the_hub_does_not_take_its_place(tmp_path, name):
    write(tmp_path / "openai" / "gsm8k" / "test.jsonl", "another")
    with pytest.raises(ValueError, match=r"is openai/gsm8k on the hub, but here is a folder .* write \./openai/gsm8k"):
        prompts(name)
    assert prompts("./openai/gsm8k") == ["another"]


def test_what_save_to_disk_wrote_is_refused_with_the_way_to_read_it(tmp_path):
    for mark in ("state.json", "dataset_dict.json"):
        place = tmp_path / mark.partition(".")[0]
        place.mkdir()
        (place / mark).write_text("{}")
        for name in (str(place), f"{place}:train"):
            with pytest.raises(ValueError, match=rf"load_from_disk\('{place}'\)\.to_parquet\("):
                resolve(name)


CALLS = """
import json, sys
from bapo.tasks.data.rows import hub_rows, read_rows
for call in json.loads(sys.argv[1]):
    try:
        print([row.values["prompt"] + "|" + row.place for row in hub_rows(*call)])
    except ValueError as error:
        print(error)
"""


def test_the_hub_package_reads_a_data_set_and_says_what_failed(tmp_path):
    """The package takes a directory laid out as on the hub in place of a name; its cache goes to a place of its own."""
    pytest.importorskip("datasets")
    write(tmp_path / "repo" / "train.jsonl", "a", "b")
    write(tmp_path / "repo" / "test.jsonl", "c")
    repo = str(tmp_path / "repo")
    calls = [(repo, None, "train"), (repo,), (repo, None, "dev"), ("openai/gsm8k", "main", "test")]
    ran = subprocess.run(
        [sys.executable, "-c", CALLS, json.dumps(calls)],
        cwd=REAL.parents[2],  # where PYTHONPATH=src would lead to the package
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    read, ambiguous, unknown, offline = ran.stdout.splitlines()
    assert read == f"['a|{repo}:train, row 1', 'b|{repo}:train, row 2']"
    assert ambiguous == f"{repo} has the splits train, test. Name one: {repo}:train."
    assert "could not be loaded from the hub: ValueError: Unknown split" in unknown
    assert "data set 'openai/gsm8k:main:test' could not be loaded from the hub: ConnectionError" in offline
    assert "Without a network, give the path of" in offline


def test_without_the_package_the_hub_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the datasets package. Install it with `pip install 'bapo\[data\]'`"):
        next(hub_rows("owner/name"))


def test_a_directory_that_may_not_be_searched_is_refused_in_words(tmp_path, monkeypatch):
    write(tmp_path / "data" / "train.jsonl", "a")

    is_file = Path.is_file

    def forbidden(path):
        if path.name == "train.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", forbidden)
    with pytest.raises(ValueError, match=r"data cannot be searched for data: .*Permission denied.* Name a directory"):
        resolve("data")


@pytest.mark.parametrize("name", ["a" * 5000, f"label={'a' * 5000}", f"{'a' * 300}:train"])
def test_a_name_that_no_file_can_have_is_refused_in_words(name):
    with pytest.raises(ValueError, match=r"cannot be looked up: File name too long. Give a name or a path that exists"):
        resolve(name)


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (lambda pa: pa.timestamp("ms", "Evil/Zone"), 0),
        (lambda pa: pa.timestamp("ms"), 2**60),
        (lambda pa: pa.date32(), 2**30),
        (lambda pa: pa.duration("s"), 2**62),
    ],
    ids=["zone", "timestamp", "date", "duration"],
)
def test_dates_that_python_lacks_are_refused_with_their_rows(tmp_path, kind, number):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = pa.array([number], pa.int32() if kind(pa) == pa.date32() else pa.int64()).cast(kind(pa))
    pq.write_table(pa.table({"prompt": ["1"], "answer": ["1"], "when": column}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read"):
        list(read_rows(tmp_path / "a.parquet"))


def test_text_that_is_not_utf8_is_refused_with_its_rows(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = pa.array([b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"prompt": text}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read from row 1 to row 1: UnicodeDecodeError"):
        list(read_rows(tmp_path / "a.parquet"))
