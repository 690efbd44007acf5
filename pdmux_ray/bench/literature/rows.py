"""A publication's figures beside ours, and how they are printed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmux_ray.report import figures


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `published`: None where the source states none; `ours`: None where there is nothing to compare with it."""

    what: str
    published: float | None
    ours: float | None
    unit: str
    published_as: str | None = None  # in the source's words, where they say more than the number
    ours_as: str | None = None  # likewise: a bound, an interval

    @property
    def ratio(self) -> float | None:
        """Ours over the published one."""
        if not self.published or self.ours is None:
            return None
        return self.ours / self.published

    def cells(self) -> list[str]:
        published = self.published_as or figures.significant(self.published)
        ours = self.ours_as or figures.significant(self.ours)
        return [self.what, published, ours, self.unit, figures.significant(self.ratio)]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All of one publication."""

    title: str
    source: str
    rows: Sequence[Row]
    assumed: Sequence[str]
    why: str  # ours differ

    def lines(self) -> list[str]:
        """In Markdown."""
        heads = ["", "published", "ours", "unit", "ours / published"]
        table = [heads, ["---"] * len(heads), *(row.cells() for row in self.rows)]
        return [
            *(f"## {self.title}", "", f"Source: {self.source}", ""),
            *(f"| {' | '.join(cells)} |" for cells in table),
            *("", f"Assumed: {' '.join(self.assumed)}", "", f"Why they differ: {self.why}", ""),
        ]
