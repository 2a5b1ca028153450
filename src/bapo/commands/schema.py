"""`bapo schema`: recipes and grids as JSON schemas, from which editors complete, explain and check keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from bapo.config.command_line import parse_arguments
from bapo.config.run import OBJECTIVE_NAMES, Config
from bapo.config.sections import ADVANTAGE_NAMES
from bapo.config.sft import SftConfig
from bapo.screen.terminal import write_exact


@dataclass(frozen=True)
class Arguments:
    """Print the JSON schema of recipes, for editors.

    bapo schema > recipe.schema.json, and "#:schema ./recipe.schema.json" as the first line of a recipe.
    """

    kind: Annotated[Positional[Literal["train", "sft", "compare"]], arg(metavar="{train,sft,compare}")] = "train"
    """The command whose recipes or grids are described."""


def schema(words: list[str]) -> int:
    """Carry out `bapo schema`."""
    kind = parse_arguments(Arguments, words, prog="bapo schema").kind
    write_exact(json.dumps(schema_of(kind), indent=2) + "\n")
    return 0


def schema_of(kind: str) -> dict[str, Any]:
    """The JSON schema of what a command runs."""
    found = _recipe(SftConfig if kind == "sft" else Config)
    if kind == "compare":
        found = _grid(found)
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": f"bapo {kind}", **found}


def _recipe(config: type[Config] | type[SftConfig]) -> dict[str, Any]:
    """The schema of a recipe. TOML has no null, so it is taken out where it only means that a key is not given."""
    schema: dict[str, Any] = json.loads(json.dumps(config.model_json_schema()).replace("#/$defs/", "#/definitions/"))
    schema["definitions"] = schema.pop("$defs")
    sections = schema["definitions"]
    if config is Config:
        sections["ObjectiveConfig"]["properties"]["name"]["enum"] = ["auto", *OBJECTIVE_NAMES]
        sections["LearnConfig"]["properties"]["advantages"]["enum"] = list(ADVANTAGE_NAMES)
    return schema


def _grid(recipe: dict[str, Any]) -> dict[str, Any]:
    """The schema of a grid: the keys of a recipe in base and in every objective and setting."""
    keys = {key: value for key, value in recipe["properties"].items() if key not in ("seed", "out")}
    text, whole = {"type": "string"}, {"type": "integer", "minimum": 0}

    def table(description: str, **more: Any) -> dict[str, Any]:
        properties = {**more, **keys}
        return {
            "type": "object",
            "description": description,
            "properties": properties,
            "additionalProperties": False,
            "required": [key for key in more if key == "label"],
        }

    entry = {"label": text | {"description": "Names the directory."}}
    return {
        "type": "object",
        "description": "A grid of runs: objectives x settings x seeds.",
        "definitions": recipe["definitions"],
        "properties": {
            "name": text | {"description": "Name of the tables."},
            "out": text | {"description": "The directory of all runs."},
            "seeds": {
                "description": "How many seeds, or a list of them.",
                "anyOf": [{"type": "integer", "minimum": 1}, {"type": "array", "items": whole}],
            },
            "base": table("Keys of every run.", recipe=text | {"description": "A recipe that the keys override."}),
            "objective": {"type": "array", "items": table("A row: a label, and the keys that make it.", **entry)},
            "setting": {"type": "array", "items": table("A table: a label, and the keys that make it.", **entry)},
        },
        "additionalProperties": False,
    }
