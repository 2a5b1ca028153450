"""What the command line says when a command cannot go on."""

import pytest

from bapo.cli import run


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(28, "No space left on device"), 4, "No space left on device. Nothing was written but scratch files"),
        (KeyboardInterrupt(), 130, "stopped at once; nothing was written, and the same command begins again."),
    ],
)
def test_a_download_that_stopped_says_nothing_of_runs(error, code, message, monkeypatch, tmp_path, capsys):
    def fetch(_directory):
        raise error

    monkeypatch.setattr("bapo.models.smollm2.fetch", fetch)
    assert run(["fetch-smollm2", str(tmp_path / "model")]) == code
    said = capsys.readouterr().err
    assert message in said
    assert " runs" not in said
