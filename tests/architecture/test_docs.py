"""What the documents say of the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .sources import ROOT

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
