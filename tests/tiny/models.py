"""Tiny random models of real architectures.

`tiny` makes models with weights so large that attention matters: with the usual deviation of 0.02, a leak between
sequences would go unseen. `untrained` makes models as training starts from, for a tokenizer. A test whose numbers
depend on a size names that size.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCABULARY, STOP, POSITIONS = 32, 3, 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 2,
    "eos_token_id": STOP,
    "pad_token_id": 0,
}
ONE_LAYER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
PECULIAR = {
    "qwen2": {"tie_word_embeddings": False},  # biased projections, separate head
    "qwen3": {"head_dim": 16},  # normalised queries and keys, its own head width
    "mistral": {"sliding_window": 7},  # shorter than the responses
    "gpt2": {"num_key_value_heads": 4},  # learned absolute positions
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def tiny_config(architecture: str = "llama", **sizes: object) -> PretrainedConfig:
    return AutoConfig.for_model(architecture, **{**SIZES, **PECULIAR.get(architecture, {}), **sizes})


def tiny(architecture: str = "llama", *, seed: int = 0, **sizes: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(architecture, **sizes)).eval()


def shallow(architecture: str = "llama") -> PreTrainedModel:
    """One layer of it, for Triton's interpreter, where a second one would show nothing more."""
    return tiny(architecture, num_hidden_layers=1)


def untrained(tokenizer, **sizes):
    """A Llama that knows nothing yet, with a row for each of the tokenizer's tokens."""
    heads = sizes.get("num_attention_heads", SIZES["num_attention_heads"])
    of_the_tokenizer = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return tiny(**{**of_the_tokenizer, "num_key_value_heads": heads, "initializer_range": 0.02, **sizes})


def without_layers(architecture="llama", **sizes):
    """Its layers add nothing, so a state is its token's embedding, normalised: the same bits however it is computed."""
    model = tiny(architecture, **sizes)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(parameter)
    return model


def windowed():
    """Its last layer sees three tokens: attention that is not packed."""
    return tiny("qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=1)
