"""Dumps: every format and every dialect gives the same tokens; bad files say what is wrong."""

import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from bapo.config.errors import DumpError
from bapo.diagnose.dumps import NAMES, read_dump

MASK = np.array([[1, 1, 0], [1, 1, 1]])
LOGPROBS = np.array([[-0.5, -1.0, 0.0], [-0.25, -2.0, -0.125]], dtype=np.float32)
BEHAVIOR = LOGPROBS - 0.25
COLUMNS = {
    "logprobs": LOGPROBS,
    "behavior_logprobs": BEHAVIOR,
    "advantages": np.array([1.0, -1.0], dtype=np.float32),
    "mask": MASK,
}


def write(path, columns):
    columns = {name: np.ascontiguousarray(values) for name, values in columns.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        np.savez(path, **columns)
    else:
        save_file(columns, path)
    return path


def read(path, columns, mapping=None):
    return read_dump([write(path, columns)], mapping)


def refused(paths, mapping=None):
    with pytest.raises(DumpError) as error:
        read_dump(paths if isinstance(paths, list) else [paths], mapping)
    return str(error.value)


def check_tokens(update):
    np.testing.assert_array_equal(update.logprobs, [-0.5, -1.0, -0.25, -2.0, -0.125])
    np.testing.assert_array_equal(update.behavior_logprobs, update.logprobs - 0.25)
    np.testing.assert_array_equal(update.advantages, [1, 1, -1, -1, -1])
    np.testing.assert_array_equal(update.sequence_ids, [0, 0, 1, 1, 1])


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_padded_arrays_become_the_tokens_under_the_mask(tmp_path, suffix):
    dump = read(tmp_path / f"a{suffix}", COLUMNS)
    (update,) = dump.updates
    check_tokens(update)
    assert (update.name, update.sequences) == (f"a{suffix}", 2)
    assert update.entropy is update.staleness is update.rewards is update.anchor is None


def test_packed_tokens_with_and_without_ids(tmp_path):
    chosen = MASK.astype(bool)
    packed = {
        "logprobs": LOGPROBS[chosen],
        "behavior_logprobs": BEHAVIOR[chosen],
        "advantages": np.array([1, 1, -1, -1, -1.0]),
    }
    (plain,) = read(tmp_path / "a.npz", packed).updates
    assert plain.sequence_ids is None
    assert plain.sequences is None
    (named,) = read(tmp_path / "b.npz", packed | {"sequence_ids": np.array([7, 7, 9, 9, 9])}).updates
    check_tokens(named)
    per_response = packed | {"sequence_ids": np.array([7, 7, 9, 9, 9]), "advantages": np.array([1.0, -1.0])}
    check_tokens(read(tmp_path / "c.npz", per_response).updates[0])


@pytest.mark.parametrize("as_float", [False, True])
def test_parquet_lists_and_flat_columns(tmp_path, as_float):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    chosen = MASK.astype(bool)
    kind = pa.list_(pa.float32()) if as_float else pa.large_list(pa.float64())
    lists = {
        name: pa.array([values[row][chosen[row]].tolist() for row in range(2)], kind)
        for name, values in (("logprobs", LOGPROBS), ("behavior_logprobs", BEHAVIOR))
    }
    table = pa.table(lists | {"advantages": [1.0, -1.0], "prompt": ["a", "b"], "rewards": [1, 0], "update": [3, 3]})
    pq.write_table(table, tmp_path / "a.parquet")
    (update,) = read_dump([tmp_path / "a.parquet"]).updates
    check_tokens(update)
    assert update.name == "3"
    assert update.rewards.tolist() == [1, 0]

    flat = pa.table({"logprobs": LOGPROBS[chosen], "behavior_logprobs": BEHAVIOR[chosen], "advantages": [1.0] * 5})
    pq.write_table(flat, tmp_path / "b.parquet")
    assert read_dump([tmp_path / "b.parquet"]).updates[0].logprobs.tolist() == LOGPROBS[chosen].tolist()

    pq.write_table(pa.table(lists | {"advantages": pa.array([1.0, None])}), tmp_path / "c.parquet")
    assert "'advantages' has 1 nulls" in refused(tmp_path / "c.parquet")


def test_parquet_without_pyarrow_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # Python's own way to say that a module is not there
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert "pip install 'bapo[parquet]'" in refused(tmp_path / "a.parquet")


def test_padded_parquet_lists_use_their_mask(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = {name: COLUMNS[name].tolist() for name in ("logprobs", "behavior_logprobs", "mask")}
    fixed = pa.array(rows.pop("logprobs"), pa.list_(pa.float32(), 3))
    pq.write_table(pa.table(rows | {"logprobs": fixed, "advantages": [1.0, -1.0]}), tmp_path / "a.parquet")
    check_tokens(read_dump([tmp_path / "a.parquet"]).updates[0])


TRL = {"logprobs": "per_token_logps", "behavior_logprobs": "old_per_token_logps", "mask": "completion_mask"}
VERL = {"logprobs": "log_prob", "behavior_logprobs": "old_log_probs", "mask": "response_mask"}


@pytest.mark.parametrize("names", [TRL, VERL])
def test_names_of_trl_and_verl(tmp_path, names):
    dump = read(tmp_path / "a.npz", {names.get(name, name): values for name, values in COLUMNS.items()})
    check_tokens(dump.updates[0])
    assert dump.columns["behavior_logprobs"] == names["behavior_logprobs"]


@pytest.mark.parametrize(("role", "name"), [(role, name) for role, names in NAMES.items() for name in names])
def test_every_name_is_found(tmp_path, role, name):
    values = {
        "entropy": np.ones((2, 3)), "anchor": BEHAVIOR, "tool_mask": MASK, "versions": np.zeros((2, 3)), "version": 2,
        "staleness": np.ones(2), "uses": np.ones(2), "sequence_ids": np.zeros((2, 3)), "rewards": np.ones(2),
        "update": 5, "log_kept": np.zeros((2, 3)),
    } | COLUMNS  # fmt: skip
    columns = {key: column for key, column in COLUMNS.items() if key != role} | {name: np.asarray(values[role])}
    assert read(tmp_path / "a.npz", columns).columns[role] == name


def test_the_samplers_own_logprobs_are_behavior_and_the_recomputed_ones_are_kept(tmp_path):
    columns = {
        "per_token_logps": LOGPROBS,
        "old_per_token_logps": LOGPROBS - 0.125,
        "sampling_per_token_logps": BEHAVIOR,
        "completion_mask": MASK,
        "advantages": COLUMNS["advantages"],
    }
    (update,) = read(tmp_path / "a.safetensors", columns).updates
    check_tokens(update)
    np.testing.assert_array_equal(update.anchor, update.logprobs - 0.125)


def test_a_batch_from_before_the_update_has_the_recomputed_logprobs_as_the_learners(tmp_path):
    columns = {
        "old_log_probs": LOGPROBS, "rollout_log_probs": BEHAVIOR, "response_mask": MASK,
        "advantages": np.ones((2, 3)), "token_level_rewards": np.array([[0, 1.0, 9.0], [0, 0, 0.5]]),
    }  # fmt: skip
    dump = read(tmp_path / "a.npz", columns)
    np.testing.assert_array_equal(dump.updates[0].logprobs, LOGPROBS[MASK.astype(bool)])
    assert "stand in for them" in dump.notes[0]
    assert dump.updates[0].rewards.tolist() == [1.0, 0.5]  # what lies under the mask, summed per response


def test_tool_tokens_are_masked_out(tmp_path):
    tool = np.array([[1, 0, 1], [1, 1, 1]])
    assert len(read(tmp_path / "a.npz", COLUMNS | {"tool_mask": tool}).updates[0].logprobs) == 4


def test_names_of_your_own(tmp_path):
    columns = {"lp": LOGPROBS, "q": BEHAVIOR, "adv": COLUMNS["advantages"], "m": MASK}
    mapping = {"logprobs": "lp", "behavior_logprobs": "q", "advantages": "adv", "mask": "m"}
    check_tokens(read(tmp_path / "a.npz", columns, mapping).updates[0])
    message = refused(tmp_path / "a.npz", {"logprobs": "lq"})
    assert "no column 'lq'" in message
    assert "lp [2, 3]" in message
    assert "behaviour=" in refused(tmp_path / "a.npz", {"behaviour": "q"})


def test_staleness_from_versions(tmp_path):
    versions = np.array([[3, 4, 0], [5, 5, 5]])
    (known,) = read(tmp_path / "a.npz", COLUMNS | {"versions": versions, "version": np.array(6)}).updates
    assert known.staleness.tolist() == [3, 2, 1, 1, 1]
    dump = read(tmp_path / "b.npz", COLUMNS | {"versions": versions})
    assert dump.updates[0].staleness.tolist() == [2, 1, 0, 0, 0]
    assert "lower bound" in dump.notes[0]


@pytest.mark.parametrize(
    ("uses", "read_as"),
    [
        (np.array([0, 3]), [0, 0, 3, 3, 3]),
        (np.array([0, 3], dtype=np.uint8), [0, 0, 3, 3, 3]),
        (np.array([False, True]), [0, 0, 1, 1, 1]),
        (np.array([[0, 1, -9], [2, 2, 4.0]]), [0, 1, 2, 2, 4]),
        (np.array(2), [2] * 5),
    ],
)
def test_uses_are_whole_numbers_per_token_response_or_file(tmp_path, uses, read_as):
    (update,) = read(tmp_path / "a.npz", COLUMNS | {"uses": uses}).updates
    assert update.uses.tolist() == read_as
    assert update.uses.dtype == np.int64


@pytest.mark.parametrize(("value", "shown"), [(-1, "-1"), (0.5, "0.5")])
def test_uses_that_count_nothing_are_refused(tmp_path, value, shown):
    message = refused(write(tmp_path / "a.npz", COLUMNS | {"uses": np.array([1, value])}))
    assert f"uses is {shown} in 3 of 5 tokens" in message
    assert "how often a token was trained on before" in message


def test_uses_that_a_part_of_an_update_lacks_are_dropped(tmp_path):
    step = {"step": np.array(1)}
    write(tmp_path / "0.npz", COLUMNS | step | {"uses": np.array([1, 2])})
    assert read_dump([tmp_path]).updates[0].uses.tolist() == [1, 1, 2, 2, 2]
    write(tmp_path / "1.npz", COLUMNS | step)
    assert read_dump([tmp_path]).updates[0].uses is None


def test_parts_of_one_update_are_put_together_and_files_counted_as_people_do(tmp_path):
    for update, part in ((10, 0), (10, 1), (2, 0)):
        write(
            tmp_path / f"{update}-{part}.npz", COLUMNS | {"update": np.array(update), "rewards": np.array([0.0, 1.0])}
        )
    first, second = read_dump([tmp_path]).updates
    assert (first.name, second.name) == ("2", "10")
    check_tokens(first)
    assert second.sequence_ids.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    assert second.rewards.tolist() == [0, 1, 0, 1]

    (tmp_path / "other").mkdir()
    for name in ("step10", "step2"):
        write(tmp_path / "other" / f"{name}.npz", COLUMNS)
    assert [update.name for update in read_dump([tmp_path / "other"]).updates] == ["step2.npz", "step10.npz"]


def test_one_file_with_an_update_per_row(tmp_path):
    first, second = read(tmp_path / "a.npz", COLUMNS | {"step": np.array([1, 0])}).updates
    assert (first.name, second.name) == ("0", "1")
    assert first.advantages.tolist() == [-1, -1, -1]
    assert first.sequence_ids.tolist() == [0, 0, 0]


def test_updates_have_names_that_tell_them_apart(tmp_path):
    steps = (1000001, 1000002, 2**53 + 1, 2**53 + 2)
    for step in steps:
        write(tmp_path / "numbered" / f"{step}.npz", COLUMNS | {"step": np.array(step)})
    assert [update.name for update in read_dump([tmp_path / "numbered"]).updates] == [str(step) for step in steps]
    halves = refused(write(tmp_path / "a.npz", COLUMNS | {"step": np.array([2.0, 2.5])}))
    assert "update is 2.5 in 3 of 5 tokens" in halves

    paths = [
        write(tmp_path / "files" / name, COLUMNS) for name in ("r0/0.npz", "r1/0.npz", "r1/0.safetensors", "r1/1.npz")
    ]
    names = [update.name for update in read_dump([tmp_path / "files"]).updates]
    assert sorted(names) == ["r0/0.npz", "r1/0.npz", "r1/0.safetensors", "r1/1.npz"]
    assert [update.name for update in read_dump(paths[:1]).updates] == ["0.npz"]


def test_columns_that_hold_no_numbers_are_passed_over_unless_they_are_needed(tmp_path):
    others = {"prompts": np.array(["a", None], dtype=object), "ids": np.array(["x", "y"])}
    check_tokens(read(tmp_path / "a.npz", COLUMNS | others).updates[0])
    for values in (LOGPROBS.astype(str), LOGPROBS.astype(complex), np.zeros((2, 3), dtype="M8[s]")):
        message = refused(write(tmp_path / "b.npz", COLUMNS | {"logprobs": values}))
        assert "b.npz has no column for logprobs" in message


@pytest.mark.parametrize(
    ("kind", "newest", "token", "age"), [("u1", 3, 5, -2), ("i1", 100, -100, 200), ("f4", 5, 3, 2)]
)
def test_small_integers_do_not_wrap_around(tmp_path, kind, newest, token, age):
    columns = COLUMNS | {"versions": np.full(2, token, kind), "version": np.array(newest, kind)}
    assert read(tmp_path / "a.npz", columns).updates[0].staleness.tolist() == [age] * 5


@pytest.mark.parametrize("role", ["staleness", "versions", "version", "step", "uses"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_ages_and_steps_must_be_numbers_under_the_mask(tmp_path, role, value):
    columns = COLUMNS | {"versions": np.zeros((2, 3)), role: np.where([[1, 1, 1], [1, 0, 1]], 3.0, value)}
    name = "update" if role == "step" else role
    assert f"{name} is {value} in 1 of 5 tokens" in refused(write(tmp_path / "a.npz", columns))
    padded = columns | {role: np.where(MASK, 3.0, value)}
    (update,) = read(tmp_path / "b.npz", padded).updates
    check_tokens(update)


def test_half_precision_is_read(tmp_path):
    columns = {name: torch.from_numpy(values) for name, values in COLUMNS.items()}
    columns |= {name: columns[name].bfloat16() for name in ("logprobs", "behavior_logprobs")}
    save_torch(columns, tmp_path / "a.safetensors")
    check_tokens(read_dump([tmp_path / "a.safetensors"]).updates[0])


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".parquet"])
def test_damaged_files(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    whole = write(tmp_path / ("a.npz" if suffix == ".parquet" else f"a{suffix}"), COLUMNS).read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 8):
        path = tmp_path / f"cut{suffix}"
        path.write_bytes(whole[:size])
        assert "cannot be read" in refused(path)


def test_files_that_are_no_dump(tmp_path):
    pickle = tmp_path / "a.pt"
    pickle.write_bytes(b"x")
    for path in (pickle, tmp_path):
        message = refused(path)
        assert "Opening a pickle runs code" in message
        assert "save_file" in message
    assert "does not exist" in refused(tmp_path / "b.npz")
    (tmp_path / "a.csv").write_text("x")
    assert "has the ending .csv" in refused(tmp_path / "a.csv")
    (tmp_path / "empty").mkdir()
    assert "holds: nothing" in refused(tmp_path / "empty")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"logprobs": None}, ["no column for logprobs", "per_token_logps", "mask [2, 3]", "--map logprobs=COLUMN"]),
        ({"behavior_logprobs": None}, ["no column for behavior_logprobs", "old_log_probs", "rollout_log_probs"]),
        ({"advantages": None}, ["no column for advantages"]),
        ({"mask": None}, ["padded arrays [2, 3] but no mask", "response_mask"]),
        ({"mask": MASK * 0}, ["selects no token in any of 1 updates"]),
        ({"mask": MASK * 0.5}, ["values other than 0 and 1"]),
        ({"behavior_logprobs": BEHAVIOR[:, :2]}, ["behavior_logprobs has shape [2, 2]", "logprobs has shape [2, 3]"]),
        ({"advantages": np.ones(3)}, ["advantages has shape [3]", "one per response (2)"]),
        ({"logprobs": np.ones((1, 2, 3))}, ["shape [1, 2, 3]"]),
    ],
)
def test_what_is_missing_or_does_not_fit(tmp_path, change, parts):
    columns = {name: values for name, values in (COLUMNS | change).items() if values is not None}
    message = refused(write(tmp_path / "a.npz", columns))
    for part in parts:
        assert part in message


def test_rows_without_tokens_are_counted(tmp_path):
    dump = read(tmp_path / "a.npz", COLUMNS | {"mask": MASK * [[0], [1]]})
    assert dump.updates[0].sequence_ids.tolist() == [0, 0, 0]
    assert "1 of 2 responses have no token" in dump.notes[0]


@pytest.mark.parametrize("byte", [6, 8])  # of the header of a member: its flags (encrypted), its compression
def test_an_npz_with_a_damaged_member_is_refused_in_words(byte, tmp_path):
    path = tmp_path / "dump.npz"
    np.savez(path, logprobs=np.zeros((2, 3)))
    data = bytearray(path.read_bytes())
    for header, place in ((b"PK\3\4", byte), (b"PK\1\2", byte + 2)):
        data[data.index(header) + place] |= 1
    path.write_bytes(data)
    with pytest.raises(DumpError, match=r"cannot be read: .* It is damaged, cut short, or not a npz file"):
        read_dump([path])
