"""Loads a GGUF file as a model that trains like any other.

transformers reads the file and turns its quantised blocks into ordinary numbers. But it keeps the model marked as
quantised, and such a model can be neither saved nor reliably trained. So we move its weights into a fresh model with
the same configuration and without that mark. The precision that quantisation lost does not come back: the result is
the quantised model in ordinary numbers.
"""

from __future__ import annotations

from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers


def load_gguf(path: Path, *, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """The model and the tokenizer in a GGUF file."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file.")
    absent = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if absent:
        raise ValueError(
            f"reading GGUF needs the package {absent[0]}, which is not installed. Install it with "
            "`pip install 'bapo[gguf]'`."
        )
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
        "trust_remote_code": False,
    }
    unpacked: Any = transformers.GgufConfig(dequantize=True)  # otherwise some stay packed where kernels exist for that
    with redirect_stderr(StringIO()):  # hides a progress bar that cannot be switched off
        read: Any = transformers.AutoModelForCausalLM.from_pretrained(
            **place, dtype=dtype, quantization_config=unpacked
        )
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**place)
    settings = read.config.to_dict()
    for mark in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(mark, None)
    config = type(read.config).from_dict(settings)
    model: Any = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=dtype, trust_remote_code=False, **options
    )
    try:
        model.load_state_dict(read.state_dict())
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip().rstrip(".")
        raise ValueError(
            f"the weights in {path.name} do not fit the configuration that transformers {transformers.__version__} "
            f"reads from it ({reason}). Use the transformers directory of this model instead."
        ) from error
    model.generation_config = read.generation_config
    if tokenizer.model_max_length > config.max_position_embeddings:  # the file states no limit
        tokenizer.model_max_length = config.max_position_embeddings
    return model.eval(), tokenizer
