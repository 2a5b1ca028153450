"""Families of what people write by hand: recipes, command lines, grids."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from campaign_parts.fuzz import Family, parsed
from campaign_parts.fuzz_values import edited, json_values, scalars, strange

SHIPPED = Path(__file__).resolve().parents[2] / "src" / "bapo"
GRID_KEYS = ("name", "out", "seeds", "base", "objective", "setting", "steps", "kind")


def families() -> dict[str, Family]:
    """All of them."""
    grids = [path.read_bytes() for path in sorted(SHIPPED.glob("grids/*.toml"))]
    texts = [path.read_bytes() for path in sorted(SHIPPED.glob("recipes/*.toml"))] + grids
    return {
        "recipe text": Family(20, st.tuples(st.booleans(), edited(texts)), _recipe_text),
        "recipe values": Family(40, st.tuples(st.booleans(), _recipe()), _recipe_values),
        "command line": Family(1, _words(), _command_line, chunk=100),
        "grid text": Family(8, edited(grids), _grid_text),
        "grid values": Family(12, _grid(), _grid_values),
    }


def _keys(supervised: bool) -> list[str]:
    from bapo.config.run import Config
    from bapo.config.sft import SftConfig
    from bapo.config.words import leaves

    return list(leaves(SftConfig if supervised else Config))


def _schema(supervised: bool) -> Any:
    from bapo.config.run import Config
    from bapo.config.sft import SftConfig

    return SftConfig if supervised else Config


@st.composite
def _recipe(draw: st.DrawFn) -> dict[str, Any]:
    """Known keys, mostly, with values that fit or do not."""
    values: dict[str, Any] = {}
    mild = draw(st.booleans())
    defaults = _defaults()
    for _ in range(draw(st.integers(1, 5))):
        key = draw(st.sampled_from(sorted(defaults))) if draw(st.integers(0, 19)) else draw(st.text(max_size=12))
        *tables, name = key.split(".")
        inner = values
        for table in tables:
            inner = inner[table] if isinstance(inner.get(table), dict) else inner.setdefault(table, {})
            if not isinstance(inner, dict):
                return values
        near = _near(defaults.get(key))
        inner[name] = draw(near) if mild else draw(st.one_of(near, scalars, strange, json_values))
    return values


@cache
def _defaults() -> dict[str, Any]:
    """Every key of both configurations, with its default."""
    found: dict[str, Any] = {}
    for supervised in (True, False):
        for key in _keys(supervised):
            value = _schema(supervised)().model_dump(mode="json")
            for part in key.split("."):
                value = value[part]
            found[key] = value
    return found


def _near(default: Any) -> st.SearchStrategy[Any]:
    """Values that are like a default."""
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, int):
        return st.sampled_from([default, default + 1, 2 * default, max(0, default - 1)])
    if isinstance(default, float):
        return st.sampled_from([default, default / 2, 2 * default])
    return st.just(default) if default is not None else st.sampled_from([None, 1, 0.5, "auto"])


@st.composite
def _words(draw: st.DrawFn) -> list[str]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(_keys(False))).replace("_", "-")
        found.append(f"--{key}" if draw(st.integers(0, 9)) else draw(st.text(max_size=8)))
        value = draw(scalars)
        found += [str(value)[:300]] if draw(st.integers(0, 9)) else []
    return found


@st.composite
def _grid(draw: st.DrawFn) -> Any:
    entry = st.dictionaries(
        st.sampled_from(["label", "objective", "offpolicy", "steps", "seed", "out", "learn", "x"]),
        st.one_of(strange, json_values, st.dictionaries(st.sampled_from(["name", "reuse", "lr", "preset"]), scalars)),
        max_size=3,
    )
    lists = st.lists(st.one_of(entry, entry.map(lambda given: {"label": "a"} | given)), max_size=3)
    fitting = {
        "name": scalars, "out": scalars, "seeds": st.one_of(scalars, st.lists(scalars, max_size=4)),
        "base": _recipe(), "objective": lists, "setting": lists, "steps": scalars, "kind": scalars,
    }  # fmt: skip
    chosen = draw(st.lists(st.sampled_from(GRID_KEYS), max_size=6, unique=True))
    if draw(st.booleans()):
        arm = st.sampled_from(["grpo", "bapo", "clip_higher", "gspo", "x"])
        labelled = {"label": draw(st.sampled_from(["a", "b.1", "", "/"])), "objective": {"name": draw(arm)}}
        usual = {"objective": [labelled], "seeds": draw(st.integers(0, 4)), "base": {"steps": draw(st.integers(0, 9))}}
        return usual | {key: draw(fitting[key]) for key in chosen[:1]}
    return {key: draw(fitting[key]) if draw(st.integers(0, 4)) else draw(json_values) for key in chosen}


def _recipe_text(case: tuple[bool, bytes], inside: Path) -> None:
    from bapo.config.recipe import COMMANDS, parse, read_recipe_for

    supervised, text = case
    path = inside / "recipe.toml"
    path.write_bytes(text)
    parse(_schema(supervised), read_recipe_for(COMMANDS[_schema(supervised)], path), source="recipe")


def _recipe_values(case: tuple[bool, dict[str, Any]], inside: Path) -> None:
    from bapo.config.recipe import COMMANDS, parse, read_recipe_for

    supervised, values = case
    path = inside / "recipe.json"
    path.write_text(json.dumps(values))
    config = parse(_schema(supervised), read_recipe_for(COMMANDS[_schema(supervised)], path), source="recipe")
    kept = json.dumps(config.model_dump(mode="json"))  # as config.json keeps it
    again = parse(_schema(supervised), json.loads(kept), source="config.json")
    assert again == config, f"config.json does not hold the configuration: {again} and {config}"


def _command_line(case: list[str], inside: Path) -> None:
    from bapo.commands.training import read_request
    from bapo.config.run import Config

    parsed(lambda: read_request(Config, case).checked_config())


def _grid_text(case: bytes, inside: Path) -> None:
    path = inside / "grid.toml"
    path.write_bytes(case)
    _plan(path)


def _grid_values(case: Any, inside: Path) -> None:
    path = inside / "grid.json"
    path.write_text(json.dumps(case))
    _plan(path)


def _plan(path: Path) -> None:
    from bapo.compare.grid import load_grid
    from bapo.compare.jobs import default_parallel, make_plan

    grid = load_grid(path)
    jobs = make_plan(grid)
    assert jobs
    default_parallel([job.cell for job in jobs])
    json.dumps(grid.record())
