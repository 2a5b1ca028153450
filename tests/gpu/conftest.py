"""What torch warns of on CUDA, and we cannot change."""

from pathlib import Path

import pytest

OF_TORCH = (
    "ignore:Synchronization debug mode is a prototype:UserWarning",  # the switch that finds host syncs
    "ignore:Warning. Profiler clears events at the end of each cycle:UserWarning",  # counting launches
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning",  # torch.compile, of torch itself
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # torch.compile, of a tensor it looks at
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for warning in OF_TORCH:
                item.add_marker(pytest.mark.filterwarnings(warning))
