from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from pdmux_ray.bench.calibration import __main__ as command
from pdmux_ray.bench.calibration.__main__ import Judged, holds, main, table
from pdmux_ray.bench.calibration.estimates import Estimate
from pdmux_ray.bench.calibration.rows import Group, Row, UncostedError, read
from pdmux_ray.bench.calibration.serving import SERVING, fit

COLUMNS = (
    *("id", "concurrency", "backend", "model_path", "system", "precision", "mode", "isl", "osl", "gemm_quant_mode"),
    *("moe_quant_mode", "batch_size", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size"),
    *(
        f"{phase}_{key}"
        for phase in ("prefill", "decode")
        for key in ("batch_size", "num_workers", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    ),
    *("silicon_ttft_ms", "silicon_tpot_ms"),
)
LINE = {
    "id": "a",
    "concurrency": "8",
    "backend": "vllm",
    "model_path": "meta-llama/Llama-3.1-70B",
    "system": "h200_sxm",
    "precision": "fp8",
    "mode": "agg",
    "isl": "1024",
    "osl": "1024",
    "tp_size": "4",
    "batch_size": "8",
    "silicon_ttft_ms": "100",
    "silicon_tpot_ms": "10",
}
APART = {"mode": "disagg", "prefill_num_workers": "1", "prefill_tp_size": "4", "decode_num_workers": "2", "decode_tp_size": "8"}


def written(path: Path, *lines: Mapping[str, str]) -> Path:
    table_path = path / "rows.csv"
    texts = [",".join({**LINE, **line}.get(column, "") for column in COLUMNS) for line in lines]
    table_path.write_text("\n".join([",".join(COLUMNS), *texts]) + "\n")
    return table_path


def row(path: Path, **line: str) -> Row:
    (_, found), *_ = read(written(path, line))
    assert isinstance(found, Row), found
    return found


def test_a_line_is_what_was_served_on_what_and_what_was_measured(tmp_path: Path) -> None:
    found = row(tmp_path)
    assert (found.together, found.concurrency, found.ttft_s, found.tpot_s) == (Group(4, 1, 1, 1), 8, 0.1, 0.01)
    assert found.kind == "llama-3.1-70b on h200_sxm by vllm"
    pools = row(tmp_path, **APART)
    assert pools.together is None
    assert pools.prefill is not None
    assert pools.decode is not None
    assert (pools.prefill.workers, pools.decode.group.tp, pools.decode.workers) == (1, 8, 2)


def test_without_a_concurrency_all_ranks_have_the_batch(tmp_path: Path) -> None:
    assert row(tmp_path, concurrency="", batch_size="4", attention_dp_size="8", tp_size="1").concurrency == 32
    assert row(tmp_path, concurrency="", decode_batch_size="4", **APART).concurrency == 8


@pytest.mark.parametrize(
    ("told", "group"),
    [
        ((64, 1, 8, 8), Group(8, 1, 1, 8)),
        ((16, 1, 4, 4), Group(4, 1, 1, 4)),
        ((1, 64, 8, 8), Group(1, 8, 1, 8)),
        ((4, 4, 1, 16), Group(4, 1, 1, 4)),
        ((4, 1, 2, 2), Group(4, 1, 2, 2)),
        ((1, 8, 1, 8), Group(1, 8, 1, 8)),
        ((72, 1, 72, 1), Group(72, 1, 72, 1)),
    ],
)
def test_a_group_that_is_told_as_its_square_is_read_as_itself(told: tuple[int, ...], group: Group) -> None:
    assert Group.of(*told) == group


def test_what_is_held_out_are_whole_kinds_whatever_their_precision_and_training(tmp_path: Path) -> None:
    one = row(tmp_path, model_path="deepseek-ai/DeepSeek-R1", precision="fp4", concurrency="64", system="b200_sxm")
    other = row(tmp_path, model_path="deepseek-ai/DeepSeek-V3", precision="fp8", system="b200_sxm", **APART)
    assert one.kind == other.kind
    assert one.held_out == other.held_out
    parts = {row(tmp_path, system=f"gpu{number}").held_out for number in range(20)}
    assert parts == {True, False}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({**APART, "decode_num_workers": ""}, "not told how many engines prefill or decode"),
        ({"concurrency": "", "batch_size": ""}, "neither concurrency nor batch size"),
        ({"pp_size": "2"}, "pipeline parallel"),
        ({"silicon_ttft_ms": "fast"}, "a number is none"),
    ],
)
def test_a_line_that_cannot_be_costed_says_why(tmp_path: Path, line: dict[str, str], why: str) -> None:
    ((_, found),) = read(written(tmp_path, line))
    assert isinstance(found, UncostedError)
    assert why in str(found)


def test_what_is_no_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_text("id,isl\na,1\n")
    assert main([str(tmp_path / "rows.csv")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main([str(tmp_path / "missing.csv")]) == 2


def kinds(path: Path) -> tuple[Row, Row]:
    """A row that is held out, and one that is not."""
    found = [row(path, system=f"gpu{number}") for number in range(20)]
    return next(each for each in found if each.held_out), next(each for each in found if not each.held_out)


def test_nothing_is_fitted_to_what_is_held_out(tmp_path: Path) -> None:
    told: list[str] = []
    assert fit([kinds(tmp_path)[0]] * 5, 1, told.append) == SERVING
    assert all("mean error inf" in line for line in told)


def test_errors_are_medians_by_kind_and_part_beside_those_of_aiconfigurator(tmp_path: Path) -> None:
    held, other = kinds(tmp_path)
    found = [
        Judged(held, Estimate(0.12, 0.0105), Estimate(0.2, 0.02)),
        Judged(held, Estimate(0.08, 0.0095), None),
        Judged(other, Estimate(0.4, 0.02), Estimate(0.1, 0.01)),
    ]
    lines = table(found)
    assert "| **held out** | 2 | 20% | 100% | 5% | 100% |" in lines
    assert "| **the others** | 1 | 300% | 0% | 100% | 0% |" in lines
    assert f"| {held.kind}, held out | 2 | 20% | 100% | 5% | 100% |" in lines
    assert holds(found)
    assert not holds(found[2:])
    assert not holds([*found, *[Judged(held, Estimate(0.4, 0.01), None)] * 3])


def test_rows_without_costs_are_counted_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, {"model_path": "nobody/Knows-1B"}, {**APART, "decode_num_workers": ""}, {"backend": "own"})
    assert main([str(path), "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().out
    assert "Median errors of 0 of 3 rows" in told
    assert "Not costed: 1 rows, the shape of nobody/Knows-1B is not known" in told
    assert "Not costed: 1 rows, not told how many engines" in told
    assert "Not costed: 1 rows, how own serves is not known" in told
    assert (tmp_path / "out" / command.FILE).read_text() == ""
