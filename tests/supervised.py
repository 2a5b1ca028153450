"""A tiny random model with a tokenizer that chats, and demonstrations it can learn in seconds."""

import json

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "0123456789+-*=,;?. \n" + "abcdefghijklmnopqrstuvwxyz" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SPECIAL = ("<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
CHAT_TEMPLATE = (  # in the style of SmolLM2 and Qwen2.5
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer(*, chat=False, eos="<|im_end|>"):
    """One token per character, and those of a chat."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token=eos,
        additional_special_tokens=[token for token in SPECIAL[1:4] if token != eos],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = CHAT_TEMPLATE if chat else None
    return made


def model(positions=64, eos=3):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(LETTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def saved_model(path, *, chat=False, positions=64):
    """A directory that model.path can name."""
    model(positions).save_pretrained(path)
    tokenizer(chat=chat).save_pretrained(path)
    return path


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums():
    """Every sum of two digits."""
    return [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(10) for b in range(10)]
