"""The embedded default: a tiny language model that half knows how to search, so that everything runs offline.

`model/` holds a Llama-architecture model of 0.8 million parameters and its character tokenizer, both in transformers
format, warm-started on noisy searches for the countdown task. `python -m bapo.demo.warm_start --out DIR` rebuilds them.
Nothing is loaded here: this module only says where the files are.
"""

from importlib.resources import files
from pathlib import Path

__all__ = ["MAX_RESPONSE_TOKENS", "model_path"]

MAX_RESPONSE_TOKENS = 64
"""Length limit the model was warm-started under: its searches fill it when they find nothing."""


def model_path() -> Path:
    """Directory of the shipped model and tokenizer, for `from_pretrained`."""
    path = Path(str(files(__name__).joinpath("model")))
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"the demo model is missing: {path} has no config.json, so this installation left out its package data. "
            "Reinstall bapo, or rebuild the model with `python -m bapo.demo.warm_start --out DIR` and use DIR."
        )
    return path
