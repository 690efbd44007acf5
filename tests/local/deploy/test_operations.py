"""What docs/operations.md says of alerts, commands and keys."""

from __future__ import annotations

import re
from typing import Any, get_args

import yaml

from pdmux_ray.config import AppConfig, parse_app_config
from pdmux_ray.metrics.catalog import CATALOG
from tests.local.deploy.files import ROOT

TEXT = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
RULES = yaml.safe_load((ROOT / "dashboards/rules.yaml").read_text(encoding="utf-8"))
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
RECORDS = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
RUNBOOK = TEXT.split("## Runbook")[1]


def test_every_alert_has_its_place_in_the_runbook_and_the_runbook_no_other() -> None:
    headings = re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE)
    assert sorted(headings) == sorted({alert["alert"] for alert in ALERTS})
    anchors = {f"docs/operations.md#{heading.lower()}" for heading in headings}
    assert {alert["annotations"]["runbook"] for alert in ALERTS} == anchors


def test_every_link_within_the_document_leads_to_a_heading() -> None:
    headings = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", TEXT, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) - headings == set()


def test_every_metric_that_is_named_is_in_the_catalog() -> None:
    named = set(re.findall(r"`?\b(pdmux_\w+)\b", TEXT)) - {"pdmux_ray"}
    known = CATALOG.keys() | {f"{name}{end}" for name in CATALOG for end in ("_sum", "_count", "_bucket")}
    assert {name for name in named if name not in known and not any(name in record for record in RECORDS)} == set()
    assert set(re.findall(r"`(\w+:pdmux_\S+)`", TEXT)) - RECORDS == set()


def test_every_config_key_that_is_named_exists() -> None:
    for key in re.findall(r"`((?:engine|gateway|placement)\.[a-z_.]+)`", TEXT):
        model: Any = AppConfig
        for part in key.split("."):
            assert model is not None, f"{key}: a value has no keys"
            assert part in model.model_fields, key
            kind = model.model_fields[part].annotation
            model = next((each for each in (kind, *get_args(kind)) if hasattr(each, "model_fields")), None)


def test_the_example_of_tracing_is_a_valid_config() -> None:
    (example,) = [block for block in re.findall(r"```yaml\n(.+?)```", TEXT, re.DOTALL) if "tracing" in block]
    assert parse_app_config(yaml.safe_load(example)).gateway.tracing is not None
