"""Everything that the page of a report shows, as values for its scripts; and the page, which holds them.

Responses come from the start, the middle and the end of a run. Their log, rollouts.jsonl, can be large, and its last
line may be half written. So only the places where lines start are noted, and the three lines that are shown are parsed.
If the log is missing or cannot be parsed, a note says so.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import bapo
from bapo.config.errors import PlaceError
from bapo.config.words import flat
from bapo.pages import CHARTS, document, number
from bapo.report.arms import Arm, Found, grid_record, run_name
from bapo.report.figures import figures, sft_figures
from bapo.report.panels import shared_counts
from bapo.report.tables import cluster_tables, overview, sft_overview
from bapo.report.verdict import verdict
from bapo.runs import files

RESPONSES = 4  # how many responses of each group are shown
CHARACTERS = 2000  # how many characters of each response are shown
NO_SAMPLES = {"shown": [], "note": "Supervised training samples no responses."}


def contents(found: Found) -> dict[str, Any]:
    """Everything the page shows, as JSON values."""
    arms = found.arms
    reinforced = [arm for arm in arms if not arm.sft]  # these come first, so they keep their numbers
    configs = [_shown(run.config) for arm in arms for run in arm.runs]
    first = configs[0] if configs else {}
    common = {key: value for key, value in first.items() if all(config.get(key) == value for config in configs)}
    drawn = [*(figures(reinforced) if reinforced else []), *sft_figures(arms)]
    return {
        "title": _title(arms),
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "by": f"bapo {bapo.__version__}",
        "settings": _unique(arm.setting for arm in arms),
        "objectives": _unique(arm.objective for arm in arms),
        "arms": [
            {
                "setting": arm.setting,
                "objective": arm.objective,
                "seeds": [run.config["seed"] for run in arm.runs],
                "runs": [str(run.path) for run in arm.runs],
                "steps": [len(run.timing) for run in arm.runs],
                "of": arm.runs[0].planned,
                "finished": [bool(run.summary) for run in arm.runs],
                "config": {k: v for k, v in _shown(arm.config).items() if k not in common and k not in ("seed", "out")},
            }
            for arm in arms
        ],
        "defects": [{"path": str(d.path), "kind": d.kind, "message": d.message} for d in found.defects],
        "table": overview(reinforced),
        "sft": sft_overview(arms),
        "cluster": cluster_tables(reinforced),
        **verdict(arms),
        "counts": shared_counts(drawn),
        "figures": [one for one in drawn if one["panels"]],
        "undrawn": [{"title": one["title"], "reason": one["note"]} for one in drawn if not one["panels"]],
        "samples": [
            {"arm": index} | (NO_SAMPLES if arm.sft else samples(arm.runs[0].path)) for index, arm in enumerate(arms)
        ],
        "common": common,
    }


def page(values: dict[str, Any], *, live: bool = False) -> str:
    """The HTML document."""
    without = "<noscript>This report is drawn by a script inside this file. Allow scripts to read it.</noscript>"
    return document(
        f"{values['title']} · bapo report",
        [without, '<main id="page"></main>'],
        styles=["report/page.css"],
        scripts=[*CHARTS, *(f"report/{name}.js" for name in ("panels", "view", "tables", "sections", "page"))],
        values=values,
        live=live,
    )


def _shown(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as the page lists it: under dotted keys, with infinity (such as no clipping) as text."""
    values: dict[str, Any] = files.strict(dict(flat(config)), spell=True)
    return values


def _title(arms: Sequence[Arm]) -> str:
    """Which runs these are, and of which model on which task: `quick: demo on countdown`.

    Supervised runs beside others are only mentioned.
    """
    compared = [arm for arm in arms if not arm.sft]
    if compared and len(compared) < len(arms):
        return f"{_title(compared)}, with supervised runs"
    if not arms:
        return "No runs"
    models = _unique(Path(arm.config["model"]["path"]).name for arm in arms)
    tasks = _unique(_task(arm.config) for arm in arms)
    named = {"models": models, "tasks": tasks}
    about = " on ".join(f"{len(names)} {kind}" if names[2:] else " and ".join(names) for kind, names in named.items())
    objectives, record = _unique(arm.objective for arm in arms), grid_record(arms) or {}
    if sum(len(arm.runs) for arm in arms) == 1:
        name = run_name(arms[0].runs[0])
    elif len(arms) > 1 and isinstance(record.get("name"), str) and record["name"]:
        name = record["name"]
    else:
        name = ", ".join([*objectives, *(_unique(arm.setting for arm in arms) if len(objectives) == 1 else ())])
    return f"{name}: {about}"


def _task(config: dict[str, Any]) -> str:
    """The name of the task; that of its data if it is what these are."""
    task = config["task"]
    files = (Path(re.split("[=:]", source)[0]).name.partition(".")[0] for source in task.get("train", ()))
    names = _unique([*files, *task.get("gym", ())]) or [str(task.get("name"))]
    return " + ".join(names[:3]) + (" + …" if names[3:] else "")


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


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
    places, position, shown = [], 0, []
    with files.opened(path) as file:
        for line in file:
            if line.endswith(b"\n"):
                places.append(position)
            position += len(line)
        if not places:
            return {"shown": [], "note": "No group has finished yet."}
        moments = {places[0]: "start", places[len(places) // 2]: "middle", places[-1]: "end"}
        for place, moment in sorted(moments.items()):
            file.seek(place)
            moment = moment if len(places) > 1 else "only sample"
            shown.append({"moment": moment} | _group(json.loads(file.readline())))
    return {"shown": shown, "note": None}


def _group(line: dict[str, Any]) -> dict[str, Any]:
    listed = list(zip(line["trajectories"], line["written_by"], strict=True))
    rewards = [float(trajectory["reward"] or 0) for trajectory, _ in listed]
    return {
        "step": int(line["step"]),
        "prompt": str(line["problem"]["prompt"]),
        "count": len(listed),
        "mean_reward": number(sum(rewards) / max(len(listed), 1)),
        "responses": [_response(trajectory, pieces) for trajectory, pieces in listed[:RESPONSES]],
    }


def _response(trajectory: dict[str, Any], pieces: list[Any]) -> dict[str, Any]:
    """A response, with its text cut where the version of the policy changes; None wrote what an environment said."""
    versions, reward = trajectory["versions"], trajectory["reward"]
    left, kept = CHARACTERS, []
    for version, piece in pieces:
        if left > 0:
            kept.append([None if version is None else int(version), str(piece)[:left]])
        left -= len(piece)
    return {
        "reward": None if reward is None else number(float(reward)),
        "status": str(trajectory["status"]),
        "tokens": len(versions),
        "ending": str(trajectory.get("ending", "")),
        "versions": [int(versions[0]), int(versions[-1])] if versions else [],
        "pieces": kept,
        "cut": max(0, -left),
    }
