"""What the server of forks works out once, before its first fork: see `tests.processes`."""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.llama import modeling_llama

from bapo.tasks.countdown import Countdown

Countdown()  # keeps the problems that it drew
get_checkpoint_conversion_mapping(modeling_llama.LlamaConfig.model_type)  # keeps its patterns
gc.collect()
gc.freeze()  # the forks collect no garbage here, and so copy none of these pages
