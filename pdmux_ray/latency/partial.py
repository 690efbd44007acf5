"""What an interrupted profile run has measured already: a line for what it is of, then one for each point."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.design import DesignLimits, design
from pdmux_ray.latency.identity import Identity, check
from pdmux_ray.latency.records import Record
from pdmux_ray.policy.views import Piece


@dataclass(frozen=True, slots=True)
class Attempt:
    """One measuring of a point. `others`: the share of the cores that somebody else used meanwhile."""

    records: list[Record]
    others: float
    took_s: float


class Partial:
    """Takes up the file at `path` if there is one. Raises ConfigError when it was begun with another identity or design."""

    def __init__(self, path: Path, identity: Identity, limits: DesignLimits) -> None:
        self._path = path
        self.took_s = 0.0  # of measuring, in all runs
        self.done: dict[int, Attempt] = {}  # point -> its calmest attempt
        self.tries: dict[int, int] = {}  # point -> how many attempts there were
        points = hashlib.sha256(repr(design(limits)).encode()).hexdigest()
        head = json.loads(json.dumps({"identity": identity.model_dump(), "limits": asdict(limits), "design": points}))
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = text.splitlines()
        if not lines:
            path.write_text(json.dumps(head) + "\n", encoding="utf-8")
            return
        if not text.endswith("\n"):
            path.write_text(text + "\n", encoding="utf-8")
        entries = list(filter(None, map(_entry, lines)))
        if "identity" not in entries[0]:
            raise ConfigError(f"{path} is not what an interrupted profile run leaves: remove it")
        check(Identity.model_validate(entries[0]["identity"]), identity, str(path), "Remove it to begin anew.")
        if entries[0] != head:
            raise ConfigError(
                f"{path} was begun with other settings of the engine, or by another version: remove it to begin anew"
            )
        for entry in entries[1:]:
            self._take(entry["point"], Attempt(list(map(_record, entry["records"])), entry["others"], entry["took_s"]))

    def add(self, point: int, attempt: Attempt) -> None:
        """Writes it down and takes it in. `point`: its place in the design. Raises OSError when it cannot be written."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"point": point, **asdict(attempt)}) + "\n")
        self._take(point, attempt)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _take(self, point: int, attempt: Attempt) -> None:
        before = self.done.get(point)
        if before is None or attempt.others <= before.others:
            self.done[point] = attempt
        self.tries[point] = self.tries.get(point, 0) + 1
        self.took_s += attempt.took_s


def _entry(line: str) -> dict[str, Any] | None:
    """None for the half line of a run that was killed while it wrote."""
    try:
        entry: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry


def _record(values: dict[str, Any]) -> Record:
    lists = {"pieces": tuple(Piece(*piece) for piece in values["pieces"]), "times_s": tuple(values["times_s"])}
    return Record(**(values | lists))
