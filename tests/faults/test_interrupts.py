"""A Ctrl-C is never lost."""

import signal
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
