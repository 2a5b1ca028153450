"""The notebook runs from top to bottom, and prints what is stored in it."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install bapo[docs]")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install bapo[docs]")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install bapo[docs]")

FILE = Path(__file__).parents[2] / "examples" / "four_tensors.ipynb"


def printed(notebook):
    return ["".join(o["text"] for o in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.filterwarnings("ignore")  # of the notebook's own machinery
def test_the_notebook_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FILE.parents[1] / "src"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    shown = nbformat.read(FILE, 4)
    fresh = nbformat.read(FILE, 4)
    nbclient.NotebookClient(
        fresh, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    assert printed(fresh) == printed(shown)
    assert any("down further" in text for text in printed(fresh))
