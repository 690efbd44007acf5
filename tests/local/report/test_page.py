from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from pdmux_ray.report import page
from pdmux_ray.report.load_report import TargetRuns, build, write_report
from tests.unit.report.samples import target

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\" onclick='alert(3)' {{ 7 * 7 }} <!--"


class Elements(HTMLParser):
    """What a browser would find."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        else:
            self.text.append(data)


@pytest.fixture(scope="module")
def hostile() -> Elements:
    targets = [
        target(HOSTILE, units=True, invalid=(8,), why=HOSTILE, error=HOSTILE),
        target(HOSTILE, error=HOSTILE),
    ]
    return Elements(build(HOSTILE, targets, [HOSTILE]))


def test_names_and_errors_stay_text(hostile: Elements) -> None:
    names = {tag for tag, _ in hostile.tags}
    assert "img" not in names
    assert not any(name.startswith("on") for _, attributes in hostile.tags for name in attributes)
    assert {attributes.get("type") for tag, attributes in hostile.tags if tag == "script"} == {"application/json", None}
    assert sum(tag == "script" and "type" not in attributes for tag, attributes in hostile.tags) == 2
    assert any(HOSTILE in text for text in hostile.text)


def test_data_is_json_that_no_name_can_end(hostile: Elements) -> None:
    data = [script for script in hostile.scripts if script.startswith("{")]
    charts = [json.loads(script) for script in data]
    assert len(charts) > 10
    assert not any("<" in script for script in data)
    assert any(HOSTILE in json.dumps(chart, ensure_ascii=False).replace('\\"', '"') for chart in charts)


def test_no_name_is_an_expression(hostile: Elements) -> None:
    for script in hostile.scripts:
        if script.startswith("{"):
            assert all("alert" not in text for text in re.findall(r'"(?:labelExpr|expr|signal)":"([^"]*)"', script))


def test_the_policy_lets_only_the_pages_own_scripts_run(hostile: Elements) -> None:
    (policy,) = [a["content"] for tag, a in hostile.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    code = [script for script in hostile.scripts if not script.startswith("{")]
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in code}
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert set(rules["script-src"].split()) == hashes
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"


def test_nothing_is_loaded(hostile: Elements) -> None:
    links = [a.get(name) for _, a in hostile.tags for name in ("src", "href", "srcset", "data") if a.get(name) is not None]
    assert links == ["data:,"]
    assert "@import" not in page._asset("page.css")
    assert "url(" not in page._asset("page.css")


def test_every_chart_is_described_and_every_table_has_a_caption(hostile: Elements) -> None:
    figures = [a for tag, a in hostile.tags if a.get("role") == "img"]
    assert len(figures) > 10
    assert all(a["aria-label"] for a in figures)
    counts = [sum(tag == name for tag, _ in hostile.tags) for name in ("table", "caption")]
    assert counts[0] == counts[1] > 5
    assert ("html", {"lang": "en"}) in hostile.tags
    headings = [int(tag[1]) for tag, _ in hostile.tags if re.fullmatch(r"h[1-6]", tag)]
    assert headings.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(headings))


def test_two_targets_of_one_name_are_told_apart() -> None:
    text = build("t", [target("same"), target("same")])
    assert "same (1)" in text
    assert "same (2)" in text


def test_invalid_runs_stand_first_and_their_row_says_so() -> None:
    text = build("t", [target("A", invalid=(8,), why="the client sent late")])
    assert text.index("1 run is invalid and must not be used") < text.index("What was run")
    assert "8 INVALID" in text
    assert "8 INVALID" not in build("t", [target("A")])


def test_what_was_asked_is_stated_once_or_for_each_target() -> None:
    one, other = (
        replace(
            target(name), summary=replace(target(name).summary, conditions={"workload": "sharegpt ÷ 8", "url": f"u:{name}"})
        )
        for name in ("A", "B")
    )
    text = build("t", [one, other], ["Every length is divided by 8."])
    assert text.count("sharegpt ÷ 8") == 1
    assert {"u:A", "u:B"} <= set(re.findall(r"u:[AB]", text))
    for wanted in ("Every length is divided by 8.", one.summary.definition[:60], "TTFT ≤ 500 ms", "90 % of requests"):
        assert wanted in text


def test_a_report_is_one_file_in_its_directory(tmp_path: Path) -> None:
    path = write_report(tmp_path / "new", "t", [target("A")])
    assert path == tmp_path / "new" / "report.html"
    assert list(path.parent.iterdir()) == [path]


def test_figures_without_raw_samples_make_a_report_too() -> None:
    whole = target("A")
    text = build("t", [TargetRuns("A", whole.summary, [(run, ()) for run in whole.summary.runs])])
    assert "Attainment over rate" in text
    assert "ITL over time" not in text
