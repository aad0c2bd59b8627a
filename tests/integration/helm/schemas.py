"""Kubernetes' own schemas, of all versions that the chart is for; unknown fields are errors."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # ships no types
from referencing import Registry, Resource

from tests.kit.engines.kubernetes.helm import Document

# From the oldest that the chart is for to the newest that is known.
VERSIONS = tuple(f"1.{minor}.0" for minor in range(26, 38))

# Documents of operators, which no Kubernetes has a schema of: what we write of them.
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_OPERATORS: dict[str, dict[str, Any]] = {
    "ServiceMonitor": {
        "required": ["selector", "endpoints"],
        "additionalProperties": False,
        "properties": {
            "jobLabel": {"type": "string"},
            "selector": {
                "additionalProperties": False,
                "properties": {"matchLabels": _TEXTS},
            },
            "namespaceSelector": {
                "additionalProperties": False,
                "properties": {"matchNames": {"type": "array", "items": {"type": "string"}}},
            },
            "endpoints": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "required": ["port"],
                    "additionalProperties": False,
                    "properties": {
                        "port": {"type": "string"},
                        "path": {"type": "string", "pattern": "^/"},
                        "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                        "basicAuth": {"required": ["username", "password"]},
                    },
                },
            },
        },
    },
    "PrometheusRule": {
        "required": ["groups"],
        "additionalProperties": False,
        "properties": {
            "groups": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "required": ["name", "rules"],
                    "additionalProperties": False,
                    "properties": {
                        "name": {"type": "string"},
                        "interval": {"type": "string"},
                        "rules": {
                            "type": "array",
                            "minItems": 1,
                            "items": {
                                "required": ["expr"],
                                "oneOf": [{"required": ["alert"]}, {"required": ["record"]}],
                                "additionalProperties": False,
                                "properties": {
                                    "alert": {"type": "string"},
                                    "record": {"type": "string"},
                                    "expr": {"type": "string"},
                                    "for": {"type": "string"},
                                    "keep_firing_for": {"type": "string"},
                                    "labels": _TEXTS,
                                    "annotations": _TEXTS,
                                },
                            },
                        },
                    },
                },
            }
        },
    },
}
OPERATORS = frozenset(_OPERATORS)


def trouble(document: Document, version: str) -> str:
    """What that version would not take of it; empty where it takes all."""
    kind, api = document["kind"], document["apiVersion"]
    if kind in _OPERATORS:
        assert api == "monitoring.coreos.com/v1", api
        validator, value = jsonschema.Draft202012Validator(_OPERATORS[kind]), document["spec"]
    else:
        validator, value = _validator(kind, api, version), document
    said = (
        f"{'.'.join(map(str, each.path))}: {each.message}" for each in validator.iter_errors(value)
    )
    return "; ".join(said)


@cache
def _validator(kind: str, api: str, version: str) -> Any:
    """A kind that this version has not is an error: FileNotFoundError."""
    group, _, number = api.rpartition("/")
    short = f"{group.partition('.')[0]}-{number}" if group else number
    schema = _read(version, f"{kind.lower()}-{short}.json")
    return jsonschema.Draft202012Validator(schema, registry=_registry(version))


@cache
def _registry(version: str) -> Any:
    definitions = Resource.from_contents(_read(version, "_definitions.json"))
    return definitions @ Registry()


def _read(version: str, name: str) -> Any:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}-local-strict"
    return json.loads((folder / name).read_text(encoding="utf-8"))
