"""The embedded default: a tiny language model that searches with some success, so that everything runs offline.

`model/` holds a Llama-architecture model of 0.8 million parameters and its character tokenizer, both in transformers
format. The model was warm-started on noisy searches for the countdown task. `python tools/demo_model.py --out DIR`
rebuilds both in a clone. This module loads nothing. It only says where the files are.
"""

from importlib.resources import files
from pathlib import Path

MAX_RESPONSE_TOKENS = 64
"""The length limit of the warm start. A search that finds nothing runs up to this limit."""


def model_path() -> Path:
    """The directory of the embedded model and tokenizer, for `from_pretrained`."""
    path = Path(str(files(__name__).joinpath("model")))
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"the demo model is missing: {path} has no config.json, so this installation lacks its package data. "
            "Reinstall bapo, or rebuild the model in a clone with `python tools/demo_model.py --out DIR` and set "
            "model.path=DIR."
        )
    return path
