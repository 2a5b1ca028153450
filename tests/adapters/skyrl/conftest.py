import importlib.util

from tests.adapters.skyrl.load import load_skyrl

if importlib.util.find_spec("skyrl") is not None:
    load_skyrl()
