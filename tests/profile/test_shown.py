"""The resolved print-out, the JSON Schema and the reference."""

from pathlib import Path

import pytest
import yaml

from toolkit.profile.loading import load_profile
from toolkit.profile.reference import reference
from toolkit.profile.shape import profile_keys, profile_shape, walk
from toolkit.profile.show import json_schema, resolved_text

REFERENCE = Path(__file__).parents[2] / "docs" / "profile.md"
ODD = [
    "service.environment.A=on",
    "service.environment.B=010",
    "service.environment.C=1:30",
    "service.environment.D=",
    'service.environment.E=a: "b" # c',
    "service.environment.F=null",
    "service.environment.G=é ☃ \\ %s $X",
    "service.api_key={env: KEY}",
    "service.load_timeout=1.5s",
    "engine.extra_args=['--x', 'y: z', '-']",
]


def test_resolved_text_loads_to_the_same_profile(small, tmp_path):
    resolved = load_profile(str(small), sets=ODD)
    path = tmp_path / "again.yaml"
    path.write_text(resolved_text(resolved))
    assert load_profile(str(path)).data == resolved.data


def test_resolved_text_means_the_same_to_a_yaml_1_1_reader(small):
    resolved = load_profile(str(small), sets=ODD)
    environment = yaml.safe_load(resolved_text(resolved))["service"]["environment"]
    assert environment == resolved.data["service"]["environment"]


def test_resolved_text_says_where_each_value_came_from(small):
    lines = resolved_text(load_profile(str(small), sets=["service.port=81"])).splitlines()
    assert any(line.startswith("  budget: 16 ") and line.endswith(f" # {small}:4:11") for line in lines)
    assert any(line.startswith("  port: 81 ") and line.endswith("# --set") for line in lines)
    assert any(line.startswith("  pp: 1 ") and line.endswith("# default") for line in lines)


def test_every_key_is_described():
    assert [key for key, shape in walk(profile_shape()) if not shape.description] == []


def test_the_reference_is_current():
    assert REFERENCE.read_text() == reference(), "python -m toolkit.profile.reference > docs/profile.md"


def test_the_reference_has_every_key():
    text = reference()
    assert [key for key in profile_keys() if f"| `{key.rsplit('.', 1)[-1]}` |" not in text] == []


def test_the_schema_closes_every_section():
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False, section["title"]


def test_the_schema_accepts_the_shipped_profiles():
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    for path in (Path(__file__).parents[2] / "profiles").glob("*.yaml"):
        jsonschema.validate(yaml.safe_load(path.read_text()), json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "a", "budget": 7}, json_schema())
