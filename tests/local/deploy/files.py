"""The files of deploy/, read."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"


def documents(path: str) -> list[Any]:
    """Of a YAML file in deploy/."""
    return list(yaml.safe_load_all((DEPLOY / path).read_text(encoding="utf-8")))


def document(path: str) -> Any:
    (only,) = documents(path)
    return only


def environment(path: str) -> dict[str, str]:
    """Of a file of KEY=VALUE lines."""
    lines = (DEPLOY / path).read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def check(value: Any, kind: str) -> None:
    """Raises jsonschema.ValidationError when it is not as `schemas.yaml` says."""
    jsonschema.validate(value, {"$ref": f"#/definitions/{kind}", **_schemas()})


@cache
def _schemas() -> dict[str, Any]:
    schemas: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "schemas.yaml").read_text(encoding="utf-8"))
    return schemas
