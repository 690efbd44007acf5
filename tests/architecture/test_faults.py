"""What `docs/faults.md` says of tests."""

from __future__ import annotations

import re

from .sources import ROOT

LINES = (ROOT / "docs/faults.md").read_text(encoding="utf-8").splitlines()
ROWS = [line for line in LINES if line.startswith("|")]


def test_every_reported_fault_has_a_row() -> None:
    assert [int(row.split("|")[1]) for row in ROWS if re.match(r"\| \d+ \|", row)] == list(range(1, 47))


def test_every_test_that_a_row_names_is_where_it_says() -> None:
    gone = []
    introduction = " ".join(LINES[: LINES.index(ROWS[0])])
    for row in (introduction, *ROWS):
        text = ""
        for word in re.findall(r"`([^`]+)`", row):
            if word.endswith(".py"):
                text = (ROOT / word).read_text(encoding="utf-8")
            elif word.startswith("test_") and f"def {word.partition('[')[0]}(" not in text:
                gone.append(word)
    assert gone == []
