"""The JSON schema that `bapo schema` writes for editors."""

import json
import tomllib

import pytest

from bapo.cli import run
from bapo.commands.completion import schema_of
from bapo.config.recipe import shipped
from bapo.config.run import Config
from bapo.config.words import leaves


def conforms(value, schema, definitions):
    """Whether a value fits the parts of JSON schema that are used here."""
    if "$ref" in schema:
        return conforms(value, definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return any(conforms(value, one, definitions) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    if schema.get("type") in ("integer", "number"):
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        return numeric and value >= schema.get("minimum", value) and value > schema.get("exclusiveMinimum", value - 1)
    if not isinstance(value, kinds[schema["type"]]):
        return False
    if isinstance(value, list):
        return all(conforms(item, schema["items"], definitions) for item in value) if "items" in schema else True
    if isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(key in value for key in schema.get("required", ())) and all(
            conforms(inner, known[key], definitions)
            if key in known
            else conforms(inner, other, definitions)
            if isinstance(other, dict)
            else other
            for key, inner in value.items()
        )
    return True


@pytest.mark.parametrize("kind", ["train", "sft", "compare"])
def test_every_shipped_file_fits_its_schema_and_mistakes_do_not(kind, capsys):
    assert run(["schema", kind]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == schema_of(kind)
    files = shipped(f"bapo {kind}").values()
    for path in files:
        values = tomllib.loads(path.read_text())
        assert conforms(values, schema, schema["definitions"]), path
        assert not conforms(values | {"stepps": 3}, schema, schema["definitions"])
    bad = {"base": {"learn": {"lr": 0}}} if kind == "compare" else {"learn": {"lr": 0}}
    assert not conforms(bad, schema, schema["definitions"])


def test_the_schema_explains_every_key():
    schema = schema_of("train")

    def described(section, prefix=""):
        for name, entry in section["properties"].items():
            if "$ref" in entry:
                yield from described(schema["definitions"][entry["$ref"].rpartition("/")[2]], f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", entry.get("description")

    found = dict(described(schema))
    assert found.keys() == leaves(Config).keys()
    assert all(found.values())
    assert schema["definitions"]["ObjectiveConfig"]["properties"]["name"]["enum"][:2] == ["grpo", "clip_higher"]
