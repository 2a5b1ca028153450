"""A Ctrl-C is never lost."""

import signal
import subprocess
import sys
import time

from bapo import cli


class Destructed:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)  # Python drops what is raised here


def test_a_ctrl_c_during_a_destructor_still_stops_the_command(monkeypatch, capsys):
    def command(_words):
        Destructed()
        time.sleep(2)
        return 0

    monkeypatch.setitem(cli.COMMANDS, "eval", cli.Command(command, "", "", cli.COMMANDS["eval"].remedy))
    assert cli.run(["eval"]) == 130
    said = capsys.readouterr().err
    assert "The same command continues: bapo eval" in said
    assert "Traceback" not in said


def test_a_ctrl_c_after_the_work_is_done_ends_in_no_traceback(tmp_path):
    # A library that tidies up at the end of the process is interrupted. The command itself has said all it has to say.
    late = "import atexit, signal; atexit.register(signal.raise_signal, signal.SIGINT)"
    script = f"{late}\nfrom bapo.cli import main\nmain(['--version'])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert result.stdout.startswith("0.")
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "")
