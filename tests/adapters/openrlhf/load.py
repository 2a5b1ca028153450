"""OpenRLHF on a machine without flash-attention: its loss module alone, as OpenRLHF's own tests load it."""

import importlib.util
import sys
import types
from pathlib import Path


def load_openrlhf():
    """Make `openrlhf.models.loss` importable, real and whole, without the package's __init__ and its CUDA kernels."""
    installed = importlib.util.find_spec("openrlhf")
    if installed is not None and importlib.util.find_spec("flash_attn") is None:
        models = types.ModuleType("openrlhf.models")
        models.__path__ = [str(Path(folder) / "models") for folder in installed.submodule_search_locations]
        sys.modules.setdefault("openrlhf.models", models)
