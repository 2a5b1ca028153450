"""What shells offer: bash, zsh and fish, with the scripts of `bapo completion`."""

import os
import pty
import re
import select
import shutil
import subprocess
import time

import pytest

from bapo.cli import COMMANDS, named, run
from bapo.commands.completion import completed


@pytest.mark.parametrize("name", COMMANDS)
def test_completion_offers_what_the_help_lists(name, capsys):
    found = completed(name, named(COMMANDS[name].arguments))
    assert run([name, "--help"]) == 0
    said = capsys.readouterr().out.replace("_", "-")
    for option in found.options:
        if option not in ("--list", "--dry-run") and name != "resume":
            assert option.replace("_", "-") in said, option


def bash(line, script):
    """What bash offers at the end of a line."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    program = (
        f"{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _bapo; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_bash_completes_commands_options_choices_and_names(here, capsys):
    assert run(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert bash("bapo ", script) == {*COMMANDS, "--help", "--version"}
    assert bash("bapo tr", script) == {"train"}
    assert bash("bapo train off", script) == {"offpolicy"}
    assert bash("bapo compare qu", script) == {"quick"}
    assert bash("bapo train --objective.n", script) == {"--objective.name"}
    assert bash("bapo train --objective.name g", script) == {"grpo", "gspo"}
    assert bash("bapo train --task.train tr", script) == {"train.jsonl"}
    assert bash("bapo init ", script) >= {"demo", "data", "trl", "verl"}
    assert bash("bapo report --l", script) == {"--live"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_offers_every_command_option_and_choice(shell, capsys):
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{' '.join(COMMANDS)} --help --version" in script
    lines = set(script.splitlines())
    for name, command in COMMANDS.items():
        found = completed(name, named(command.arguments))
        options, words = " ".join(found.options), " ".join(found.words)
        if shell == "bash":
            assert f'        {name}) options="{options}"; words="{words}" ;;' in lines
        elif shell == "zsh":
            assert f"        {name}) options=({options}); names=({words}) ;;" in lines
        for option, choices in found.options.items():
            offered = " ".join(choices)
            if shell == "fish":
                after = f'complete -c bapo -n "__bapo_command {name}" -l {option[2:]}'
                assert (f'{after} -x -a "{offered}"' if choices else after) in lines
            elif choices:
                offers = (
                    f'COMPREPLY=($(compgen -W "{offered}" -- "$cur"))' if shell == "bash" else f"compadd -- {offered}"
                )
                assert f'        "{name} {option}") {offers}; return ;;' in lines


def fish(line, script):
    """What fish offers at the end of a line."""
    program = f"source {script}; complete -C '{line}'"
    done = subprocess.run(["fish", "--no-config", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return {offer.partition("\t")[0] for offer in done.stdout.splitlines()}


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes_commands_options_choices_and_names(here, capsys):
    assert run(["completion", "fish"]) == 0
    script = here / "script.fish"
    script.write_text(capsys.readouterr().out)
    assert fish("bapo ", script) == {*COMMANDS, "--help", "--version"}
    assert fish("bapo tr", script) == {"train"}
    assert fish("bapo train off", script) == {"offpolicy"}
    assert fish("bapo train --objective.n", script) == {"--objective.name"}
    assert fish("bapo train --objective.name g", script) == {"grpo", "gspo"}
    assert fish("bapo train --task.train tr", script) == {"train.jsonl"}
    assert fish("bapo init ", script) >= {"demo", "data", "trl", "verl"}
    assert fish("bapo report train --l", script) == {"--live"}


class Zsh:
    """An interactive zsh at the end of a pseudo-terminal, in which a person types and presses Tab."""

    def __init__(self, script, place):
        (place / ".zshrc").write_text(f"PROMPT='ready> '\nfpath=({place}/none $fpath)\nsource {script}\n")
        self.terminal, end = pty.openpty()
        environment = os.environ | {"ZDOTDIR": str(place), "TERM": "dumb"}
        streams = {"stdin": end, "stdout": end, "stderr": end}
        self.process = subprocess.Popen(["zsh", "-i"], env=environment, start_new_session=True, **streams)
        os.close(end)
        self.until("ready> ")

    def until(self, end):
        """What it writes until it has written this, or ten seconds have passed."""
        told, deadline = "", time.monotonic() + 10
        while end not in told and time.monotonic() < deadline:
            if select.select([self.terminal], [], [], 0.1)[0]:
                told += os.read(self.terminal, 65536).decode(errors="replace")
        return told

    def typed(self, keys):
        """The line after these keys, as zsh would run it."""
        os.write(self.terminal, f'{keys}\x01print -r -- "<\x05>"\r'.encode())
        told = self.until("\nready> ")
        return re.findall(r"^<(.*)>\r?$", told, re.MULTILINE)[-1]

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_completes_commands_options_choices_and_names(here, capsys):
    assert run(["completion", "zsh"]) == 0
    (here / "script.zsh").write_text(capsys.readouterr().out)
    zsh = Zsh(here / "script.zsh", here)
    try:
        assert zsh.typed("bapo tr\toffp\t--objective.n\tgr\t") == "bapo train offpolicy --objective.name grpo"
        assert zsh.typed("bapo train --task.train tr\tx") == "bapo train --task.train train.jsonl x"
        assert zsh.typed("bapo compare qu\tx") == "bapo compare quick x"
        assert zsh.typed("bapo init ve\tx") == "bapo init verl x"
        assert zsh.typed("bapo report train --l\tx") == "bapo report train --live x"
    finally:
        zsh.close()
