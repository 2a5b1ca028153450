"""A tiny model with a tokenizer that chats, and demonstrations it can learn in seconds."""

import json

from tests.tiny.models import untrained
from tests.tiny.tokenizers import characters


def model(tokens, positions=64):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": positions}
    return untrained(tokens, **sizes, tie_word_embeddings=True)


def saved_model(path, *, chat=False, positions=64):
    """A directory that model.path can name."""
    tokens = characters(chat=chat)
    model(tokens, positions).save_pretrained(path)
    tokens.save_pretrained(path)
    return path


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums():
    """Every sum of two digits."""
    return [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(10) for b in range(10)]
