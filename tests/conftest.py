"""What holds for every test.

Without CUDA, Triton kernels run under Triton's interpreter; it must be chosen before the first kernel is defined.
Ctrl-C is heeded: a background job of a shell ignores it, and so would the processes that tests start and interrupt.
"""

import json
import os
import signal

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROWS = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8)]


@pytest.fixture(autouse=True)
def handlers_of_signals():
    """A command that ends in this process leaves signals as the end of a process wants them: no test inherits that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory but for train.jsonl and test.jsonl."""
    monkeypatch.chdir(tmp_path)
    for name, rows in (("train", ROWS[:6]), ("test", ROWS[6:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path
