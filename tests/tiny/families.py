"""Tiny models of real families, each with a tokenizer and a chat template of that family's shape.

The weights are random and the vocabulary is the 256 bytes plus special tokens; everything else is as those who publish
such models do it: which end tokens there are and who names them, who writes the beginning-of-sequence token, what the
template opens a response with, whether there is a token to pad with, whether head and embedding are one matrix.
"""

from dataclasses import dataclass, field, replace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.tiny.models import tiny

SIZES = {
    "vocab_size": 272,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n" + "DEFAULT<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<｜Assistant｜>' + m['content'] + eos_token }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role'])"
    " + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
NO_THINKING = (
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """What a family's published files say."""

    architecture: str
    special: tuple[str, ...]
    template: str
    eos: str  # the tokenizer's
    ends: tuple[str, ...]  # the generation settings'
    stops: tuple[str, ...]  # what a sampler has to stop at
    asked: str  # the chat [user: "Hi"] as text
    adds_bos: bool = False  # whether the tokenizer puts bos before plain text
    bos: str | None = None
    pad: str | None = None
    plain: tuple[str, ...] = ("<think>", "</think>")  # added tokens that are not special
    options: dict[str, object] = field(default_factory=dict)  # of the model's configuration


_QWEN = Family(
    "qwen2",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    CHATML + "{% endif %}",
    eos="<|im_end|>",
    pad="<|endoftext|>",
    ends=("<|im_end|>", "<|endoftext|>"),
    stops=("<|im_end|>", "<|endoftext|>"),
    asked="<|im_start|>system\nDEFAULT<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    options={"tie_word_embeddings": True},
)
FAMILIES = {
    "qwen2.5-instruct": _QWEN,
    # its settings know nothing of the token its template ends a turn with
    "qwen2.5-base": replace(_QWEN, eos="<|endoftext|>", ends=("<|endoftext|>",)),
    "qwen3": replace(_QWEN, architecture="qwen3", template=CHATML + NO_THINKING + "{% endif %}", options={}),
    "llama3": Family(
        "llama",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        LLAMA3,
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        adds_bos=True,
        ends=("<|end_of_text|>", "<|eot_id|>"),
        stops=("<|end_of_text|>", "<|eot_id|>"),
        asked="<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        options={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "r1-distill-qwen": Family(
        "qwen2",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        R1,
        eos="<｜end▁of▁sentence｜>",
        pad="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        adds_bos=True,
        ends=("<｜end▁of▁sentence｜>",),
        stops=("<｜end▁of▁sentence｜>",),
        asked="<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\n",
    ),
    "smollm2": replace(
        _QWEN, architecture="llama", bos="<|im_start|>", pad="<|im_end|>", ends=("<|im_end|>",), stops=("<|im_end|>",)
    ),
    "mistral": Family(
        "mistral",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        MISTRAL,
        eos="</s>",
        bos="<s>",
        adds_bos=True,
        ends=("</s>",),
        stops=("</s>",),
        asked="<s>[INST] Hi[/INST]",
    ),
    "gemma3": Family(
        "gemma3_text",
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        GEMMA,
        eos="<eos>",
        bos="<bos>",
        pad="<pad>",
        adds_bos=True,
        ends=("<eos>", "<end_of_turn>"),
        stops=("<eos>", "<end_of_turn>"),
        asked="<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    ),
}


def soft_capped():
    """Its logits pass through 30 tanh(x / 30)."""
    return tiny("gemma2", **SIZES, final_logit_softcapping=30.0)


def make_tokenizer(family):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(family.special))
    inner.add_tokens(list(family.plain))
    if family.adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, inner.token_to_id(family.bos))]
        )
    names = {"bos_token": family.bos, "eos_token": family.eos, "pad_token": family.pad}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, **{name: token for name, token in names.items() if token is not None}
    )
    tokenizer.chat_template = family.template
    return tokenizer


def make_model(name):
    family = FAMILIES[name]
    model = tiny(family.architecture, **SIZES, **family.options)
    tokenizer = make_tokenizer(family)
    ids = tokenizer.convert_tokens_to_ids(list(family.ends))
    model.config.eos_token_id = ids[0]
    model.config.bos_token_id = tokenizer.bos_token_id
    model.config.pad_token_id = None
    model.generation_config.eos_token_id = ids if len(ids) > 1 else ids[0]
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    return model, tokenizer


def publish(name, directory):
    """The family's files, as one would download them."""
    model, tokenizer = make_model(name)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)
