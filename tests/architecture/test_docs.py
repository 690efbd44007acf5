"""What the documents say of the tree."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

import pytest

from kv_transfer.api import FenceReason, LossReason
from pdmux_ray.bench import fault_points, handoffs
from pdmux_ray.costs.gpu import GPUS, SHAPES
from pdmux_ray.costs.sm_share import Assumptions
from pdmux_ray.engine.counters import LANDED, ExportEnd
from pdmux_ray.policy.decisions import BurstReason, FetchReason, ModeReason, PlacementReason, RouteReason, StepReason

from .sources import ROOT, files

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
# `pdmux_ray/policy`, `serve/launch.py`, `tests/architecture/test_imports.py`: a path from the root or from pdmux_ray.
PATH = re.compile(r"`((?:[a-z_]+/)+[a-z_.]+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_every_link_leads_to_a_file(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text(encoding="utf-8")) if not re.match(r"[a-z]+:", link)]
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_every_path_that_is_named_exists(document: Path) -> None:
    named = [name for name in PATH.findall(document.read_text(encoding="utf-8")) if name not in LATER]
    assert [n for n in named if not any((base / (n + end)).exists() for base in BASES for end in ("", ".py"))] == []


BASES = (ROOT, ROOT / "pdmux_ray")
LATER = ("tests/gpu",)  # described before it is there


LAYOUT = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## Layout")[1].split("```")[1]


def test_the_layout_names_every_module() -> None:
    modules = {path.stem for path in files("pdmux_ray", "kv_transfer")} - {"__init__"}
    assert modules - set(re.findall(r"\w+", LAYOUT)) == set()


def test_the_layout_names_every_layer_of_tests() -> None:
    layers = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - {"__pycache__"}
    assert layers - set(re.findall(r"(\w+)/", LAYOUT.split("\ntests/")[1])) == set()


def explained(document: str, heading: str, column: int) -> set[str]:
    """Names in that column (from 0) of the tables under a heading, up to the next one that is as high."""
    after = (ROOT / document).read_text(encoding="utf-8").split(f"{heading}\n")[1]
    table = re.split(rf"\n#{{1,{len(heading.split()[0])}}} ", after)[0]
    rows = [row.split("|")[1 + column] for row in table.splitlines() if row.startswith("|")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_reason_of_a_step_is_explained() -> None:
    assert explained("docs/timeline.md", "## Reasons", 0) == {
        reason.value for reason in [*ModeReason, *StepReason, *BurstReason]
    }


def test_every_reason_of_a_route_is_explained() -> None:
    assert explained("docs/disaggregation.md", "### Reasons of a route", 1) == {reason.value for reason in RouteReason}


def test_every_reason_of_the_placement_is_explained() -> None:
    assert explained("docs/placement.md", "## How it decides", 0) == {reason.value for reason in PlacementReason}


def test_every_reason_of_a_transfer_is_explained() -> None:
    reasons = {reason.value for reason in [*FetchReason, *LossReason, *ExportEnd, *FenceReason]}
    assert explained("docs/disaggregation.md", "### Reasons of a transfer", 1) == reasons | {LANDED}


def test_what_is_assumed_of_gpus_has_a_row_with_its_default() -> None:
    text = (ROOT / "docs/simulate.md").read_text(encoding="utf-8")
    told = {row[0]: float(row[1]) for row in re.findall(r"^\| `(\w+)` \| ([\d.e-]+) \|", text, re.MULTILINE)}
    assert told == asdict(Assumptions())


def test_the_gpus_and_models_that_can_be_simulated_are_listed() -> None:
    text = (ROOT / "docs/simulate.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"`--gpu (\S+) --model-shape (\S+)`", text)
    assert [names.split("|") for names in listed] == [list(GPUS), list(SHAPES)]


@pytest.mark.parametrize(("command", "faults"), [("faults", fault_points.FAULTS), ("handoffs", handoffs.FAULTS)])
def test_every_fault_that_a_command_tries_is_in_the_table_of_faults(command: str, faults: Collection[str]) -> None:
    lines = (ROOT / "docs/disaggregation.md").read_text(encoding="utf-8").splitlines()
    (named,) = [line.split("|")[3] for line in lines if line.startswith(f"| `{command}` |")]
    assert sorted(re.findall(r"`([a-z-]+)`", named)) == sorted(faults)
