"""Demonstrations in a model's tokens: what the chat template would write, what is held out, what is left out."""

import pytest

from bapo.config.sft import SftTaskConfig
from bapo.models.policy import Policy, find_stop_ids
from bapo.preflight.examine import load_sft
from bapo.tasks.data.problems import Demonstration
from bapo.train.sft import (
    Batches,
    Encoded,
    Encoder,
    describe,
    encode_demonstrations,
    end_of_response,
    smallest,
)
from tests.supervised import model, sums, write_rows
from tests.tiny.tokenizers import characters


def policy(*, chat=False, positions=64, eos="<|im_end|>", **options):
    tokens = characters(chat=chat, eos=eos)
    weights = model(tokens, positions)
    return Policy(weights, tokens, find_stop_ids(tokens, weights), chat=chat, **options)


def encoded_data(path, positions=64, **keys):
    config = SftTaskConfig(train=(str(path),), **keys)
    return encode_demonstrations(load_sft(config), config, policy(positions=positions))


@pytest.mark.parametrize("system", ["", "Add."])
def test_a_chat_is_what_the_template_writes_of_the_whole_conversation(system):
    chatty = policy(chat=True, system=system)
    encoded = Encoder(chatty, None)(Demonstration("q-r", "2+3=?", "5."))
    turns = [{"role": "user", "content": "2+3=?"}, {"role": "assistant", "content": "5."}]
    messages = [{"role": "system", "content": system}, *turns] if system else turns
    whole = chatty.tokenizer.apply_chat_template(messages, tokenize=False)
    assert encoded is not None
    ids = encoded.prompt + encoded.response
    # The template goes on with a newline after the end of the turn, which nobody has to write.
    assert chatty.tokenizer.decode(ids) + "\n" == whole
    assert ids == chatty.tokenizer.encode(whole, add_special_tokens=False)[:-1]
    assert chatty.tokenizer.convert_ids_to_tokens(encoded.response) == ["5", ".", "<|im_end|>"]


def test_earlier_turns_belong_to_the_prompt():
    chatty = policy(chat=True, positions=128)
    turns = [
        *({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}),
        {"role": "user", "content": "2+2="},
    ]
    encoded = Encoder(chatty, None)(Demonstration("q-r", turns, "4"))
    whole = chatty.tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": "4"}], tokenize=False)
    assert encoded is not None
    assert chatty.tokenizer.decode(encoded.prompt + encoded.response) + "\n" == whole
    assert chatty.tokenizer.decode(encoded.response) == "4<|im_end|>"


def test_a_response_ends_where_the_sampler_stops():
    assert end_of_response(policy(chat=True), "text") == 3  # <|im_end|>
    assert end_of_response(policy(chat=True, eos="<|endoftext|>"), "text") == 3  # the template's, not the tokenizer's
    # The template's end is not learned where the sampler would run past it.
    other = policy(chat=True, eos="<|endoftext|>")
    deaf = Policy(other.model, other.tokenizer, frozenset({1}), chat=True)
    assert end_of_response(deaf, "text") == 1
    # A model that may chat and is given plain text ends as text does; a chat still ends as a chat.
    both = Policy(other.model, other.tokenizer, frozenset({1, 3}), chat=False)
    chat = [{"role": "user", "content": "1+1="}]
    assert (end_of_response(both, "text"), end_of_response(both, chat)) == (1, 3)
    assert [Encoder(both, None)(Demonstration("q-r", p, "2")).response[-1] for p in ("1+1=", chat)] == [1, 3]
    plain = policy()
    assert (end_of_response(plain, "text"), end_of_response(plain, chat)) == (3, 3)
    # Some data sets write the end themselves.
    for ended in ("2<|im_end|>", "2<|im_end|>\n", "2<|im_end|> \n "):
        assert Encoder(plain, None)(Demonstration("q-r", "1+1=", ended)).response == [plain.encode("2")[0], 3]
    assert Encoder(plain, None)(Demonstration("q-r", "1+1=", "2<|im_end|>a")).response.count(3) == 2


def test_what_does_not_fit_is_left_out_and_counted(tmp_path):
    rows = [{"prompt": "a" * n, "response": "b"} for n in range(1, 21)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    found = encoded_data(path, positions=12, holdout=0)
    assert max(len(e.prompt) + len(e.response) for e in found.train) == 12
    assert (found.counts["train"], found.counts["too_long"], found.counts["longest"]) == (10, 10, 12)
    assert describe(found.counts) == "20 rows read, 10 to learn from, 0 held out; left out: 10 longer than 12 tokens"
    assert len(encoded_data(path, max_tokens=5, holdout=0).train) == 3
    with pytest.raises(ValueError, match=r"task.train gives no demonstration.*20 longer than 2 tokens.*max_tokens"):
        encoded_data(path, max_tokens=2)


def test_a_share_of_the_prompts_is_held_out_with_all_their_responses(tmp_path):
    rows = [{"prompt": f"{a}=", "response": str(b)} for a in range(20) for b in range(3)]
    found = encoded_data(write_rows(tmp_path / "rows.jsonl", rows), holdout=0.1)
    apart, learned = ({tuple(e.prompt) for e in side} for side in (found.held_out, found.train))
    assert (len(apart), len(found.held_out), len(found.train)) == (2, 6, 54)
    assert not apart & learned
    reordered = encoded_data(write_rows(tmp_path / "other.jsonl", rows[::-1]), holdout=0.1)
    assert {tuple(e.prompt) for e in reordered.held_out} == apart
    again = encoded_data(tmp_path / "rows.jsonl", holdout=0.1)
    assert reordered.fingerprint != found.fingerprint == again.fingerprint


def test_shares_are_never_nothing_and_never_all():
    assert smallest({"a", "b", "c"}, 0.0) == set()
    assert smallest({"a", "b", "c"}, 0.01) == {"a"}
    assert smallest({"a", "b", "c"}, 0.99) == {"a", "b"}
    assert smallest({"a"}, 0.5) == set()


def test_prompts_of_the_held_out_file_are_taken_out_of_training(tmp_path):
    train = write_rows(tmp_path / "train.jsonl", sums())
    held_out = write_rows(tmp_path / "held.jsonl", [{"prompt": "3+4=", "response": "It is 7"}, *sums()[:5]])
    found = encoded_data(train, test=(str(held_out),))
    assert (len(found.train), len(found.held_out), found.counts["also_held_out"]) == (94, 6, 6)
    with pytest.raises(ValueError, match=r"task\.train gives no demonstration.*100 also held out"):
        encoded_data(train, test=(str(train),))


def test_every_demonstration_once_per_epoch_in_even_batches():
    listed = [Encoded([i], [1]) for i in range(50)]
    batches = Batches(listed, size=8, epochs=3, seed=5)
    assert (batches.per_epoch, batches.total) == (6, 18)
    drawn = [batches.at(update) for update in range(18)]
    assert {len(batch) for batch in drawn} == {8, 9}
    epochs = [[e.prompt[0] for batch in drawn[i : i + 6] for e in batch] for i in (0, 6, 12)]
    assert all(sorted(order) == list(range(50)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert Batches(listed, size=8, epochs=3, seed=5).at(13) == drawn[13]  # asked for out of turn, as after a resume
    assert Batches(listed, size=8, epochs=3, seed=6).at(13) != drawn[13]
    assert Batches(listed[:3], size=8, epochs=1, seed=0).total == 1


def test_a_prompt_without_tokens_is_named():
    with pytest.raises(ValueError, match=r"the prompt '' has no tokens.*task\.template"):
        Encoder(policy(), None)(Demonstration("q-r", "", "y"))
