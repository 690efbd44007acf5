"""One self-contained HTML page of tables and charts: no file beside it, no network, light or dark as the reader has it.

Knows nothing of what the figures mean. All texts are untrusted: the template escapes them, and the page's own policy lets a
browser run the page's two scripts alone (by their hashes), and load nothing.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from typing import Any, ClassVar

import jinja2
import vl_convert
from markupsafe import Markup

from pdmux_ray.cache import cache_folder
from pdmux_ray.report.marks import CONFIG, Line, Spec


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a legend. `shape`: box, line, dot or cross."""

    label: str
    colour: str
    shape: str = "line"

    @classmethod
    def of(cls, line: Line, shape: str = "line") -> Key:
        return cls(line.name, line.colour, shape)


@dataclass(frozen=True, slots=True)
class Row:
    cells: Sequence[str]  # the first one is the row's heading
    invalid: bool = False
    styles: Mapping[int, str] = field(default_factory=dict)  # column -> "better" or "worse"


@dataclass(frozen=True, slots=True)
class Group:
    """`span` neighbouring columns under one heading; no heading without a name."""

    name: str
    span: int


@dataclass(frozen=True, slots=True)
class Table:
    kind: ClassVar[str] = "table"
    caption: str
    columns: Sequence[str]
    rows: Sequence[Row]
    groups: Sequence[Group] = ()
    style: str = ""  # "words": cells hold words, not figures

    @property
    def openings(self) -> set[int]:
        """The columns that begin a group with a heading."""
        begins = [sum(group.span for group in self.groups[:i]) for i in range(len(self.groups))]
        return {begin for begin, group in zip(begins, self.groups, strict=True) if group.name}


@dataclass(frozen=True, slots=True)
class Chart:
    """`fallback`: its figures, for a browser without JavaScript."""

    kind: ClassVar[str] = "chart"
    spec: Spec
    title: str
    description: str  # what a reader who cannot see it should know
    legend: Sequence[Key] = ()
    note: str = ""
    fallback: Table | None = None

    @property
    def json(self) -> Markup:
        return _data(self.spec | {"description": self.description})


@dataclass(frozen=True, slots=True)
class Grid:
    """Charts side by side, where there is room."""

    kind: ClassVar[str] = "grid"
    charts: Sequence[Chart]


@dataclass(frozen=True, slots=True)
class Folded:
    kind: ClassVar[str] = "folded"
    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Card:
    """One figure that matters."""

    name: str
    figure: str
    unit: str
    lines: Sequence[str] = ()
    key: Key | None = None
    style: str = ""  # "better", "warning" or "worse"


@dataclass(frozen=True, slots=True)
class Cards:
    kind: ClassVar[str] = "cards"
    cards: Sequence[Card]


@dataclass(frozen=True, slots=True)
class Alarm:
    """What must not be overlooked."""

    kind: ClassVar[str] = "alarm"
    title: str
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Notes:
    kind: ClassVar[str] = "notes"
    lines: Sequence[str]


Block = Chart | Table | Grid | Folded | Cards | Alarm | Notes


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    blocks: Sequence[Block]
    intro: str = ""


def render(title: str, sections: Sequence[Section], lead: str = "", footer: str = "") -> str:
    """The page's HTML."""
    library, script = _library(), _asset("page.js")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.PackageLoader("pdmux_ray.report", ".")
    )
    return environment.get_template("page.html").render(
        title=title,
        sections=[section for section in sections if section.blocks],
        lead=lead,
        footer=footer,
        policy=_policy(library, script),
        style=Markup(_asset("page.css")),
        config=_data(CONFIG),
        library=Markup(library),
        script=Markup(script),
    )


def _policy(*scripts: str) -> str:
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    rules = ("default-src 'none'", f"script-src {hashes}", "style-src 'unsafe-inline'", "img-src data:")
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


@functools.cache
def _library() -> str:
    """Vega-Embed with Vega and Vega-Lite as one script, which ends no script element.

    To make it takes a second, so it is kept; where nothing can be kept, every page takes that second.
    """
    kept = cache_folder("charts") / f"vega-embed-{version('vl-convert-python')}.js"
    if kept.is_file():
        return kept.read_bytes().decode()
    library = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        new = kept.with_name(f"{kept.name}.{os.getpid()}")  # several may make it at once; each is whole
        new.write_bytes(library.encode())
        os.replace(new, kept)
    return library


@functools.cache
def _asset(name: str) -> str:
    return files("pdmux_ray.report").joinpath(name).read_text(encoding="utf-8")


def _data(document: Any) -> Markup:
    """JSON that no text in it can end or leave."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
