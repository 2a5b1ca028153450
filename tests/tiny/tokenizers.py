"""A tokenizer with one token per character, with or without a chat template, and one with a token per numbered word."""

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

LETTERS = "0123456789+-*=,;?. \n" + "abcdefghijklmnopqrstuvwxyz" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SPECIAL = ("<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
CHAT_TEMPLATE = (  # in the style of SmolLM2 and Qwen2.5
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def characters(*, chat=False, eos="<|im_end|>"):
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


def words(count):
    """The words w0, w1, ... up to that many."""
    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w1")
