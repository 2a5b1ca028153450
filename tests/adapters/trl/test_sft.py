"""Conversations with tools in TRL's own supervised trainer and here: equal tokens, and the same of them learned."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("trl")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import trl
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from bapo.config.sft import SftTaskConfig
from bapo.preflight.examine import load_sft
from bapo.train.sft import encode_demonstrations
from tests.environments import SEARCH, chatting
from tests.supervised import write_rows
from tests.tiny.families import SIZES
from tests.tiny.models import tiny

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CALLS = [{"type": "function", "function": {"name": "search", "arguments": {"q": text}}} for text in ("it", "Grüße")]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Find it."},
    {"role": "assistant", "content": "I look.", "tool_calls": CALLS[:1]},
    {"role": "tool", "name": "search", "content": "It is 4."},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    *({"role": "tool", "name": "search", "content": text} for text in ("5\n\n6", "7")),
    {"role": "assistant", "content": "Four, or seven."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
ROWS = [
    {"messages": MESSAGES, "tools": json.dumps([SEARCH])},
    {"messages": MESSAGES[1:8], "tools": json.dumps([SEARCH])},
]


def by_trl(tokenizer, out):
    """The ids of each conversation, and whether each is learned."""
    model = tiny("qwen2", **SIZES | {"vocab_size": 320, "max_position_embeddings": 4096})
    arguments = SFTConfig(
        output_dir=str(out), assistant_only_loss=True, report_to="none", use_cpu=True, bf16=False, max_length=None
    )
    data = Dataset.from_list(ROWS)
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    for row in trainer.train_dataset:
        yield row["input_ids"], [label != -100 for label in row["labels"]]


def template(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


def within(learned, breaks):
    """The same without the line breaks at both ends of each turn."""
    before, after = [False, *learned[:-1]], [*learned[1:], False]
    edges = (gap and not (left and right) for left, right, gap in zip(before, after, breaks, strict=True))
    return [own and not edge for own, edge in zip(learned, edges, strict=True)]


@pytest.mark.parametrize("name", ["qwen2_5_training", "qwen3_training", "qwen2_5", "qwen3_instruct_2507"])
def test_a_conversation_with_tools_is_the_same_and_the_same_of_it_is_learned(tmp_path, name):
    """By the marks of the template. One without gets marks from TRL, and here turns are found by their prefixes.

    TRL's marks hold the line breaks around a turn, too. The template writes them, and no model: they are not learned.
    """
    model = tiny("qwen2", **SIZES | {"vocab_size": 320, "max_position_embeddings": 4096})
    policy = replace(chatting(template(name)), model=model)
    (line,) = policy.tokenizer.encode("\n")
    config = SftTaskConfig(train=(str(write_rows(tmp_path / "rows.jsonl", ROWS)),), holdout=0)
    found = encode_demonstrations(load_sft(config), config, policy).train
    for one, (ids, learned) in zip(found, by_trl(chatting(template(name)).tokenizer, tmp_path), strict=True):
        if not name.endswith("training"):
            learned = within(learned, [token == line for token in ids])
        last = len(learned) - learned[::-1].index(True)
        assert one.prompt + one.response == ids[:last]
        assert [False] * len(one.prompt) + one.own == learned[:last]
        assert 20 < sum(one.own) < len(one.own) - 20
