"""Simulated against measured serving points of GPUs that are not at hand, with silicon's costs.

    python -m pdmux_ray.bench.calibration silicon.csv [--out DIR] [--fit]

Each row is a closed loop that was measured: a model, GPUs, a framework, lengths and a concurrency, with mean TTFT and TPOT. It
is simulated, and estimated by aiconfigurator itself. What frameworks add to their kernels' times is from rows that are not held
out (`--fit` finds it again, in minutes, tells where it differs from what stands in `serving.py`, and uses it); held out are
whole kinds of rows (a model on a GPU by a framework), about every third by a hash of its name. Rows that cannot be costed are
counted with the reason. Exit code 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from pdmux_ray.bench.calibration.estimates import Estimate, Serving, raw, simulated
from pdmux_ray.bench.calibration.rows import SPLIT, Row, UncostedError, read
from pdmux_ray.bench.calibration.serving import SERVING, TPOT_LIMIT, TTFT_LIMIT, differences, fit
from pdmux_ray.device.cpu.cores import usable_cores
from pdmux_ray.errors import ConfigError, PdmuxError
from pdmux_ray.report import figures

FILE = "calibration.jsonl"


@dataclass(frozen=True, slots=True)
class Judged:
    """A row with both estimates; `raw` is None where aiconfigurator has none."""

    row: Row
    ours: Estimate
    raw: Estimate | None


@dataclass(frozen=True, slots=True)
class Errors:
    """Median |estimate / measured - 1|; None without estimates."""

    ttft: float | None
    tpot: float | None

    @classmethod
    def of(cls, pairs: Sequence[tuple[Row, Estimate]]) -> Errors:
        if not pairs:
            return cls(None, None)
        return cls(
            median(abs(estimate.ttft_s / row.ttft_s - 1) for row, estimate in pairs),
            median(abs(estimate.tpot_s / row.tpot_s - 1) for row, estimate in pairs),
        )


def judged(rows: Sequence[Row], serving: Mapping[str, Serving], whys: Counter[str]) -> list[Judged]:
    """Those that can be simulated; the others' reasons go to `whys`."""
    found = []
    for row in rows:
        try:
            ours = simulated(row, serving)
        except UncostedError as why:
            whys[str(why)] += 1
            continue
        found.append(Judged(row, ours, _raw(row)))
    return found


def _raw(row: Row) -> Estimate | None:
    try:
        return raw(row)
    except UncostedError:
        return None


def table(found: Sequence[Judged]) -> list[str]:
    """Lines in Markdown: a row for each kind, then for each part."""
    kinds: dict[tuple[bool, str], list[Judged]] = {}
    for each in found:
        kinds.setdefault((each.row.held_out, each.row.kind), []).append(each)
    lines = [
        "| | rows | TTFT, simulated | TTFT, aiconfigurator | TPOT, simulated | TPOT, aiconfigurator |",
        "|---|---|---|---|---|---|",
        *(_line(f"{kind}{', held out' if held else ''}", kinds[held, kind]) for held, kind in sorted(kinds)),
    ]
    for name, part in (("the others", False), ("held out", True)):
        lines.append(_line(f"**{name}**", [each for each in found if each.row.held_out == part]))
    return [*lines, _line("**all**", found)]


def _line(name: str, found: Sequence[Judged]) -> str:
    ours = Errors.of([(each.row, each.ours) for each in found])
    theirs = Errors.of([(each.row, each.raw) for each in found if each.raw])
    cells = (ours.ttft, theirs.ttft, ours.tpot, theirs.tpot)
    return f"| {name} | {len(found):,} | {' | '.join('–' if cell is None else f'{cell:.0%}' for cell in cells)} |"


def holds(found: Sequence[Judged]) -> bool:
    errors = Errors.of([(each.row, each.ours) for each in found if each.row.held_out])
    if errors.ttft is None or errors.tpot is None:
        return False
    return errors.ttft <= TTFT_LIMIT and errors.tpot <= TPOT_LIMIT


def write(directory: Path, found: Sequence[Judged]) -> None:
    """A line for each row that was simulated. Raises ConfigError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / FILE).open("w", encoding="utf-8") as file:
            for each in found:
                told = {
                    "id": each.row.name,
                    "kind": each.row.kind,
                    "held_out": each.row.held_out,
                    "measured": {"ttft_s": each.row.ttft_s, "tpot_s": each.row.tpot_s},
                    "simulated": asdict(each.ours),
                    "aiconfigurator": asdict(each.raw) if each.raw else None,
                }
                file.write(json.dumps(told, separators=(",", ":")) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when a limit is missed or nothing was held out, 2 for a wrong argument."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.calibration", description=description)
    parser.add_argument("table", type=Path, metavar="CSV", help="measured points; docs/simulate.md has its columns")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"leave {FILE} there: each row with both estimates")
    parser.add_argument("--fit", action="store_true", help="find what frameworks add to their kernels' times again")
    args = parser.parse_args(argv)
    try:
        found, whys, lines = _run(args)
    except PdmuxError as error:
        print(f"calibration: {figures.printable(str(error))}", file=sys.stderr)
        return 2
    print("\n".join(table(found)))
    limits = f"Limits, held out ({SPLIT!r}): TTFT {TTFT_LIMIT:.0%}, TPOT {TPOT_LIMIT:.0%}."
    print(f"\nMedian errors of {len(found):,} of {lines:,} rows. {limits}")
    for why, count in whys.most_common():
        print(f"Not costed: {count:,} rows, {why}")
    return 0 if holds(found) else 1


def _fitted(rows: Sequence[Row]) -> Mapping[str, Serving]:
    found = fit(rows, usable_cores(), lambda text: print(text, file=sys.stderr))
    print("\n".join(differences(found)) or "The fit finds what stands in serving.py.", file=sys.stderr)
    return found


def _run(args: argparse.Namespace) -> tuple[list[Judged], Counter[str], int]:
    read_rows = read(args.table)
    whys = Counter(str(row) for _, row in read_rows if isinstance(row, UncostedError))
    rows = [row for _, row in read_rows if isinstance(row, Row)]
    serving = _fitted(rows) if args.fit else SERVING
    found = judged(rows, serving, whys)
    if args.out:
        write(args.out, found)
    return found, whys, len(read_rows)


if __name__ == "__main__":
    sys.exit(main())
