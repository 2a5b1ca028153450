"""Reads dumps: files of logged batches, from any trainer, brought into one form.

    read_dump([Path("dumps/")]) -> Dump: a list of LoggedUpdates, each with its tokens under the mask laid end to end

A file is .safetensors, .npz or .parquet and holds, per token, log-probs of the learner, log-probs of the policy that
sampled, advantages and a mask; the rest is optional. Arrays are padded [sequences, tokens], packed [tokens] with
sequence_ids, or (parquet) one list per response. A value that is the same for a whole response may be [sequences]. One
file is one update, unless it says which update it belongs to (`update` or `step`: one number, or one per row). Files of
the same update, such as its micro-batches and ranks, are put together.

Columns are recognised by the names in NAMES. If a dump has both the sampler's own log-probs and those that the trainer
recomputed (TRL's and verl's `old_*`), the sampler's are the behaviour log-probs, and the others are kept as `anchor` to
compare the two. Nothing here judges the values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from bapo.config.errors import DumpError
from bapo.diagnose.dump_files import Array, Column, Ragged, find_files, read_columns

NAMES: dict[str, tuple[str, ...]] = {
    "logprobs": ("logprobs", "per_token_logps", "log_prob", "log_probs"),
    "behavior_logprobs": ("behavior_logprobs", "sampling_per_token_logps", "rollout_log_probs"),
    "anchor": ("anchor", "old_per_token_logps", "old_log_probs", "old_log_prob"),
    "advantages": ("advantages",),
    "mask": ("mask", "completion_mask", "response_mask"),
    "tool_mask": ("tool_mask",),
    "entropy": ("entropy", "entropies", "entropys"),
    "versions": ("versions",),
    "version": ("version",),
    "staleness": ("staleness",),
    "uses": ("uses",),
    "log_kept": ("log_kept",),
    "sequence_ids": ("sequence_ids",),
    "rewards": ("rewards", "token_level_rewards", "token_level_scores"),
    "update": ("update", "step", "global_step", "global_steps"),
}
"""Role of an array -> the column names it goes by: ours, TRL's and verl's, in order of preference."""
COUNTS = ("staleness", "versions", "version", "uses", "update")
"""The roles of columns that count."""
MOST_UPDATES = 10_000
"""How many updates one file may hold, and how many different uses."""


@dataclass(frozen=True)
class LoggedUpdate:
    """The tokens that one update trained on, laid end to end."""

    name: str
    """The number of the update if the dump has it, otherwise the file's path below the directory of all files."""
    logprobs: Array
    """[tokens] under the learner."""
    behavior_logprobs: Array
    """[tokens] under the policy that sampled, as far as the dump knows."""
    advantages: Array
    """[tokens]"""
    sequence_ids: Array | None = None
    """[tokens] the response that each token belongs to, counted from 0; None if the dump does not say."""
    anchor: Array | None = None
    """[tokens] log-probs that the trainer recomputed, if the dump also has the sampler's own."""
    entropy: Array | None = None
    """[tokens] of the learner's distribution."""
    staleness: Array | None = None
    """[tokens] updates between sampling and use."""
    rewards: Array | None = None
    """[sequences]"""
    uses: Array | None = None
    """[tokens] how often each was trained on before this update; uses.py infers it where the dump does not say."""
    log_kept: Array | None = None
    """[tokens] log of the probability that truncated sampling kept, if the dump says so."""
    fresh: Array | None = None
    """[tokens] whether the learner's own weights sampled it; None if the dump does not say the learner's version."""

    @property
    def sampler_logprobs(self) -> Array:
        """[tokens] under the whole distribution that the sampler had, as far as the dump knows."""
        return self.behavior_logprobs if self.log_kept is None else self.behavior_logprobs + self.log_kept

    @property
    def sequences(self) -> int | None:
        """Responses with at least one token."""
        return None if self.sequence_ids is None else int(self.sequence_ids.max(initial=-1)) + 1


@dataclass(frozen=True)
class Dump:
    """What was read, and from where."""

    updates: list[LoggedUpdate]
    columns: dict[str, str]
    """Role -> the column that was read for it, e.g. {"mask": "response_mask"}."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the results should know about how the dump was read."""


def read_dump(paths: Sequence[Path], mapping: Mapping[str, str] | None = None) -> Dump:
    """All updates in these files and directories. `mapping` adds column names, e.g. {"logprobs": "my_column"}."""
    unknown = sorted(set(mapping or {}) - set(NAMES))
    if unknown:
        raise DumpError(f"--map {unknown[0]}=…: {unknown[0]} cannot be mapped. Choose one of {', '.join(NAMES)}.")
    parts: dict[int, list[LoggedUpdate]] = {}
    unnumbered: list[LoggedUpdate] = []
    columns: dict[str, str] = {}
    notes: list[str] = []
    files = find_files(paths)
    common = os.path.commonpath([os.path.abspath(file.parent) for file in files])
    for path in files:
        table = read_columns(path)
        chosen = _choose(path, table, mapping or {}, notes)
        columns |= {role: column for role, column in chosen.items() if role not in columns}
        named = {role: table[column] for role, column in chosen.items()}
        for number, update in _updates(path, os.path.relpath(path, common), named, notes):
            (unnumbered if number is None else parts.setdefault(number, [])).append(update)
    updates = [_merge(parts[number]) for number in sorted(parts)] + unnumbered
    if not any(len(update.logprobs) for update in updates):
        raise DumpError(
            f"the mask ({columns.get('mask', 'mask')}) selects no token in any of {len(updates)} updates. Check the "
            "code that writes it: 1 must mark the tokens that were trained on."
        )
    return Dump(updates, columns, list(dict.fromkeys(notes)))


def _choose(path: Path, table: Mapping[str, Column], mapping: Mapping[str, str], notes: list[str]) -> dict[str, str]:
    """The column for each role: {role: column}. Raises if a required one is missing."""
    chosen: dict[str, str] = {}
    for role, names in NAMES.items():
        if role in mapping:
            if mapping[role] not in table:
                raise DumpError(f"{path} has no column {mapping[role]!r} (--map {role}=…). It has: {_listed(table)}.")
            chosen[role] = mapping[role]
            continue
        present = [name for name in names if name in table and name not in mapping.values()]
        if present:
            chosen[role] = present[0]
        if len(present) > 1:
            others = ", ".join(present[1:])
            notes.append(f"{present[0]} is read as {role}, not {others}; choose with --map {role}=…")
    if "behavior_logprobs" not in chosen and "anchor" in chosen:
        chosen["behavior_logprobs"] = chosen.pop("anchor")
    if "logprobs" not in chosen and "anchor" in chosen:
        chosen["logprobs"] = chosen["anchor"]
        notes.append(
            f"the learner's log-probs in the update itself are missing: {chosen['anchor']}, recomputed before its "
            "first step, stand in for them, so the drift within the rollout batch does not show"
        )
    for role in ("logprobs", "behavior_logprobs", "advantages"):
        if role not in chosen:
            known = [*NAMES[role], *(NAMES["anchor"] if role == "behavior_logprobs" else ())]
            raise DumpError(
                f"{path} has no column for {role}; known names are {', '.join(known)}. It has: {_listed(table)}. If "
                f"one of these is it, say so with --map {role}=COLUMN."
            )
    return chosen


def _listed(table: Mapping[str, Column]) -> str:
    shown = [
        f"{name} " + (f"[{len(column.lengths)} lists]" if isinstance(column, Ragged) else f"{list(column.shape)}")
        for name, column in sorted(table.items())
    ]
    return ", ".join(shown[:40]) or "no numeric column"


@dataclass(frozen=True)
class _Layout:
    """How the tokens of a file are laid out. Its rows are responses."""

    path: Path
    tokens: int
    rows: Array | None = None  # [tokens] the row of each token
    row_count: int = 0
    shape: tuple[int, ...] | None = None  # of a padded or packed array
    lengths: Array | None = None  # of lists

    def spread(self, role: str, column: Column) -> Array:
        """One value per token, [tokens]."""
        if isinstance(column, Ragged):
            if self.lengths is not None and np.array_equal(column.lengths, self.lengths):
                return column.values
            what = f"lists of other lengths ({int(column.lengths.sum())} values)"
        else:
            if column.shape == self.shape:
                return column.reshape(-1)
            if column.size == 1:
                return np.full(self.tokens, column.reshape(-1)[0])
            if self.rows is not None and column.shape in ((self.row_count,), (self.row_count, 1)):
                return np.asarray(column.reshape(-1)[self.rows])
            what = f"shape {list(column.shape)}"
        here = f"{self.row_count} lists, {self.tokens} values" if self.shape is None else f"shape {list(self.shape)}"
        rows = "" if self.rows is None else f", or one per response ({self.row_count})"
        raise DumpError(
            f"{self.path}: {role} has {what}, but logprobs has {here}. Each column needs one value per token{rows}. "
            "Slice all columns to the response tokens in the same way."
        )


def _layout(path: Path, columns: Mapping[str, Column]) -> _Layout:
    logprobs = columns["logprobs"]
    if isinstance(logprobs, Ragged):
        count = len(logprobs.lengths)
        rows = np.repeat(np.arange(count), logprobs.lengths)
        return _Layout(path, len(rows), rows, count, lengths=logprobs.lengths)
    size, shape = logprobs.size, logprobs.shape
    if logprobs.ndim == 2:
        if not size:
            raise DumpError(f"{path}: logprobs has shape {list(shape)}, which holds no token. Leave the file out.")
        return _Layout(path, size, np.repeat(np.arange(shape[0]), shape[1]), shape[0], shape)
    if logprobs.ndim != 1:
        allowed = "[sequences, tokens] (padded) or [tokens] (packed)"
        raise DumpError(f"{path}: logprobs has shape {list(shape)}, but it must be {allowed}.")
    if (ids := columns.get("sequence_ids")) is None:
        return _Layout(path, size, shape=shape)
    if isinstance(ids, Ragged) or ids.shape != shape or not np.issubdtype(ids.dtype, np.integer):
        raise DumpError(f"{path}: sequence_ids must be one integer per token, {list(shape)}, as logprobs is.")
    values, rows = np.unique(ids, return_inverse=True)
    return _Layout(path, size, rows, len(values), shape)


def _updates(
    path: Path, file_name: str, columns: Mapping[str, Column], notes: list[str]
) -> list[tuple[int | None, LoggedUpdate]]:
    """The updates in one file, each with its number if it has one."""
    layout = _layout(path, columns)
    rows, rewards = layout.rows, columns.get("rewards")
    tokens = {role: layout.spread(role, column) for role, column in columns.items() if role != "sequence_ids"}
    mask = _mask(layout, tokens)
    counts = {role: _whole(path, role, tokens[role], mask) for role in COUNTS if role in tokens}
    numbers = _ages(counts, mask, notes) | ({"uses": counts["uses"]} if "uses" in counts else {})
    for role in {"logprobs", "behavior_logprobs", "advantages", "anchor", "entropy", "log_kept"} & tokens.keys():
        wide = tokens[role].dtype in (np.float32, np.float64)
        numbers[role] = tokens[role] if wide else tokens[role].astype(np.float32)
    empty = 0 if rows is None else layout.row_count - len(np.unique(rows[mask]))
    if empty and mask.any():
        responses = f"{empty} of {layout.row_count} responses"
        notes.append(f"{path.name}: {responses} have no token under the mask and are left out")
    if rewards is not None and rows is None:
        unknown = "packed tokens without sequence_ids do not say where a response ends"
        notes.append(f"rewards are not used, because {unknown}")
    once = rewards is not None and not isinstance(rewards, Ragged) and rewards.size in (1, layout.row_count)

    def build(name: str, chosen: Array) -> LoggedUpdate:
        ids = per_row = None
        if rows is not None:
            _, first, ids = np.unique(rows[chosen], return_index=True, return_inverse=True)
            if rewards is not None:
                values = tokens["rewards"][chosen].astype(np.float64)
                per_row = values[first] if once else np.bincount(ids, values, minlength=len(first))
        kept = {role: values[chosen] for role, values in numbers.items()}
        return LoggedUpdate(name, **kept, sequence_ids=ids, rewards=per_row)

    places = np.flatnonzero(mask)
    if (of_token := counts.get("update")) is None:
        return [(None, build(file_name, places))]
    found = np.unique(of_token[places] if len(places) else of_token)
    places = places[np.argsort(of_token[places], kind="stable")]  # each update once, not all tokens for each of them
    parts = np.split(places, np.searchsorted(of_token[places], found[1:]))
    return [(number, build(str(number), part)) for number, part in zip(found.tolist(), parts, strict=True)]


def _mask(layout: _Layout, tokens: Mapping[str, Array]) -> Array:
    if "mask" not in tokens:
        if layout.shape is not None and len(layout.shape) == 2:
            raise DumpError(
                f"{layout.path} has padded arrays {list(layout.shape)} but no mask ({', '.join(NAMES['mask'])}), so "
                "padding cannot be told from tokens. Dump it, or name its column with --map mask=COLUMN."
            )
        return np.ones(layout.tokens, dtype=bool)
    mask = tokens["mask"] * tokens["tool_mask"] if "tool_mask" in tokens else tokens["mask"]
    if not np.isin(mask, (0, 1)).all():
        raise DumpError(
            f"{layout.path}: mask holds values other than 0 and 1. Multiply weights into the advantages instead."
        )
    return np.asarray(mask != 0)


def _whole(path: Path, role: str, values: Array, mask: Array) -> Array:
    """[tokens] a column that counts, as integers. It may hold anything where the mask is 0."""
    good = np.isfinite(values) & (values == np.floor(values)) & ((values >= 0) | (role != "uses"))
    if (bad := mask & ~good).any():
        counts = "how often a token was trained on before" if role == "uses" else "updates"
        raise DumpError(
            f"{path}: {role} is {values[bad][0]} in {int(bad.sum())} of {int(mask.sum())} tokens under the mask, but "
            f"it counts {counts}. Write a whole number for each, or leave the column out."
        )
    whole = np.where(good, values, 0).astype(np.int64)
    if role in ("update", "uses") and (kinds := len(np.unique(whole))) > MOST_UPDATES:
        raise DumpError(
            f"{path}: {role} has {kinds:,} different values, but a file can hold {MOST_UPDATES:,} updates. Leave the "
            "column out if it does not count them, or write several files."
        )
    return whole


def _ages(counts: Mapping[str, Array], mask: Array, notes: list[str]) -> dict[str, Array]:
    """[tokens] staleness, and which tokens are fresh; as far as they are known."""
    if "staleness" in counts:
        age = counts["staleness"]
    elif "versions" in counts and "version" in counts:
        age = counts["version"] - counts["versions"]
    elif "versions" in counts:
        notes.append(
            "the learner's own version is missing: staleness is counted from the newest token, so it is a lower bound"
        )
        return {"staleness": counts["versions"].max(initial=0, where=mask) - counts["versions"]}
    else:
        return {}
    return {"staleness": age, "fresh": age == 0}


def _merge(parts: list[LoggedUpdate]) -> LoggedUpdate:
    """Put the parts of one update (micro-batches, ranks) together. Columns that only some of them have are dropped."""
    if len(parts) == 1:
        return parts[0]

    offsets = np.cumsum([0] + [part.sequences or 0 for part in parts[:-1]])
    columns: dict[str, Any] = {}
    for role in (one.name for one in fields(LoggedUpdate) if one.name != "name"):
        arrays = [getattr(part, role) for part in parts]
        if any(array is None for array in arrays):
            continue
        if role == "sequence_ids":
            arrays = [array + offset for array, offset in zip(arrays, offsets, strict=True)]
        columns[role] = np.concatenate(arrays)
    return LoggedUpdate(parts[0].name, **columns)
