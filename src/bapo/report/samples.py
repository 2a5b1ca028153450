"""Responses at the start, in the middle and at the end of a run, from rollouts.jsonl.

The log can be large, and its last line may be half written. So this module only notes where each line starts, and
parses the three lines that are shown. If the log is missing or cannot be parsed, a note says so.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from bapo.config.errors import PlaceError
from bapo.runs import files
from bapo.runs.numbers import number

RESPONSES = 4
"""How many responses of each group are shown."""
CHARACTERS = 2000
"""How many characters of each response are shown."""


def samples(directory: Path) -> dict[str, Any]:
    """`shown`: up to three groups, each with its moment; `note`: why there are none."""
    path = directory / "rollouts.jsonl"
    try:
        return _samples(path, path.lstat().st_size)
    except FileNotFoundError:
        return {"shown": [], "note": "There is no rollouts.jsonl, so there are no responses to show."}
    except PlaceError as error:
        return {"shown": [], "note": str(error)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        return {"shown": [], "note": f"rollouts.jsonl cannot be read: {type(error).__name__}: {error}."}


@lru_cache(maxsize=256)
def _samples(path: Path, size: int) -> dict[str, Any]:
    places, position = [], 0
    with files.opened(path) as file:
        for line in file:
            if line.endswith(b"\n"):
                places.append(position)
            position += len(line)
        if not places:
            return {"shown": [], "note": "No group has finished yet."}
        moments = {places[0]: "start", places[len(places) // 2]: "middle", places[-1]: "end"}
        if len(places) == 1:
            moments = {places[0]: "only sample"}
        shown = []
        for place, moment in sorted(moments.items()):
            file.seek(place)
            shown.append({"moment": moment} | _group(json.loads(file.readline())))
    return {"shown": shown, "note": None}


def _group(line: dict[str, Any]) -> dict[str, Any]:
    written = line.get("written_by") or [None] * len(line["responses"])
    listed = list(zip(line["trajectories"], line["responses"], written, strict=True))
    return {
        "step": int(line["step"]),
        "prompt": str(line["problem"]["prompt"]),
        "count": len(listed),
        "mean_reward": number(sum(_reward(trajectory) or 0 for trajectory, _, _ in listed) / max(len(listed), 1)),
        "responses": [_response(trajectory, text, parts) for trajectory, text, parts in listed[:RESPONSES]],
    }


def _reward(trajectory: dict[str, Any]) -> float | None:
    """None if the response was not scored."""
    return None if trajectory["reward"] is None else float(trajectory["reward"])


def _response(trajectory: dict[str, Any], text: str, parts: list[Any] | None) -> dict[str, Any]:
    versions = trajectory["versions"]
    pieces = [(int(version), str(piece)) for version, piece in parts or [(versions[0] if versions else 0, text)]]
    left, kept = CHARACTERS, []
    for version, piece in pieces:
        if left > 0:
            kept.append([version, piece[:left]])
        left -= len(piece)
    return {
        "reward": number(_reward(trajectory)),
        "status": str(trajectory["status"]),
        "tokens": len(trajectory["tokens"]),
        "versions": [int(versions[0]), int(versions[-1])] if versions else [],
        "pieces": kept,
        "cut": max(0, -left),
    }
