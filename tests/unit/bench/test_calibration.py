from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import astuple, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmux_ray.bench.calibration import __main__ as command
from pdmux_ray.bench.calibration.__main__ import Judged, holds, main, table
from pdmux_ray.bench.calibration.engines import NOTHING, Added
from pdmux_ray.bench.calibration.estimates import Estimate, Serving
from pdmux_ray.bench.calibration.rows import SPLIT, Group, Row, UncostedError, read
from pdmux_ray.bench.calibration.serving import NEUTRAL, SERVING, TRIED, Asked, differences, fit

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


HELD_OUT = {"deepseek-v3 on h200_sxm by sglang", "qwen3-32b on h100_sxm by trtllm", "minimax-m2.5 on h100_sxm by vllm"}
FITTED = {"deepseek-v3 on b200_sxm by sglang", "llama-3.1-70b on h200_sxm by trtllm", "kimi-k2.5 on b200_sxm by vllm"}


def test_what_is_held_out_was_drawn_once_by_name(tmp_path: Path) -> None:
    assert SPLIT == "held out, second draw"
    parts: dict[bool, set[str]] = {True: set(), False: set()}
    for kind in HELD_OUT | FITTED:
        model, _, rest = kind.partition(" on ")
        system, _, framework = rest.partition(" by ")
        parts[row(tmp_path, model_path=model, system=system, backend=framework).held_out].add(kind)
    assert parts == {True: HELD_OUT, False: FITTED}


@pytest.mark.parametrize(("system", "held_out"), [("h200_sxm", True), ("b200_sxm", False)])
def test_what_is_held_out_are_whole_kinds_whatever_their_precision_and_training(
    tmp_path: Path, system: str, held_out: bool
) -> None:
    one = row(
        tmp_path, model_path="deepseek-ai/DeepSeek-R1", precision="fp4", concurrency="64", system=system, backend="sglang"
    )
    other = row(tmp_path, model_path="nvidia/DeepSeek-V3.1-NVFP4", isl="8192", system=system, backend="SGLang", **APART)
    assert (one.held_out, other.held_out) == (held_out, held_out)


def test_about_every_third_kind_is_held_out(tmp_path: Path) -> None:
    drawn = [row(tmp_path, system=f"gpu{number}").held_out for number in range(300)]
    assert 70 < sum(drawn) < 130


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({**APART, "decode_num_workers": ""}, "not told how many engines prefill or decode"),
        ({"concurrency": "", "batch_size": ""}, "neither concurrency nor batch size"),
        ({"pp_size": "2"}, "pipeline parallel"),
        ({"silicon_ttft_ms": "fast"}, "a number is none: 'fast'"),
        ({"silicon_ttft_ms": ""}, "not told: silicon_ttft_ms"),
        ({"silicon_tpot_ms": "0"}, "silicon_tpot_ms of 0 or less"),
        ({"silicon_tpot_ms": "nan"}, "a number is none: 'nan'"),
        ({"isl": "inf"}, "a number is none: 'inf'"),
        ({"isl": "-5"}, "isl of 0 or less"),
        ({"osl": ""}, "not told: osl"),
        ({"osl": "1e300"}, "osl below 0 or above 1,048,576"),
        ({"concurrency": "1e12"}, "concurrency below 0 or above 1,048,576"),
        ({"tp_size": "-2"}, "tp_size below 0"),
        ({"model_path": " "}, "not told: model_path"),
        ({"system": ""}, "not told: system"),
        ({"backend": ""}, "not told: backend"),
        ({"mode": "both"}, "mode 'both' is neither agg nor disagg"),
    ],
)
def test_a_line_that_cannot_be_costed_says_why(tmp_path: Path, line: dict[str, str], why: str) -> None:
    ((_, found),) = read(written(tmp_path, line))
    assert isinstance(found, UncostedError)
    assert why in str(found)


def test_precisions_have_the_database_s_names(tmp_path: Path) -> None:
    found = row(tmp_path, gemm_quant_mode="BF16", moe_quant_mode="fp4")
    assert (found.gemm, found.moe) == ("bfloat16", "nvfp4")


def test_a_table_of_another_file_may_lack_what_has_a_default_and_write_names_as_it_likes(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    columns = ("model_path", "system", "backend", "isl", "osl", "concurrency", "tp_size", "silicon_ttft_ms", "silicon_tpot_ms")
    line = ("Qwen/Qwen3-32B", "H200", "TensorRT-LLM", "4000.0", "500", "16", "2", "310.5", "12")
    path.write_text("\ufeff" + ",".join(columns) + "\n" + ",".join(line) + ",too,many\nQwen/Qwen3-32B,H200\n", encoding="utf-8")
    (name, found), (_, short) = read(path)
    assert isinstance(found, Row)
    assert (name, found.kind, found.together) == ("line 2", "qwen3-32b on h200_sxm by trtllm", Group(2, 1, 1, 1))
    assert (found.prompt, found.concurrency, found.ttft_s) == (4000, 16, 0.3105)
    assert isinstance(short, UncostedError)


@given(st.dictionaries(st.sampled_from(COLUMNS), st.text(st.characters(codec="utf-8", exclude_characters=',"'), max_size=12)))
def test_whatever_a_line_says_it_is_a_row_or_has_a_reason(line: dict[str, str]) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "rows.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, COLUMNS, restval="").writerows([dict(zip(COLUMNS, COLUMNS, strict=True)), {**LINE, **line}])
        for _, found in read(path):
            assert isinstance(found, UncostedError) or found.tpot_s > 0


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b'id,isl\n"' + b"a" * 200_000], ids=["not UTF-8", "a field too long"])
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    assert main([str(tmp_path / "rows.csv")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main([str(tmp_path / "missing.csv")]) == 2


def test_a_table_without_the_columns_has_no_rows_and_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_text("id,isl\na,1\nb,2\n")
    assert main([str(tmp_path / "rows.csv")]) == 1
    assert "Not costed: 2 rows, neither concurrency nor batch size" in capsys.readouterr().out


def kinds(path: Path) -> tuple[Row, Row]:
    """A row that is held out, and one that is not."""
    found = [row(path, system=f"gpu{number}") for number in range(20)]
    return next(each for each in found if each.held_out), next(each for each in found if not each.held_out)


KERNELS = Estimate(0.1, 0.01)  # of every row, as the server of these tests would have it without a host


def served(row: Row, serving: Mapping[str, Serving]) -> Estimate:
    """By a server whose first tokens take a pass and what is added, and all others a step."""
    added = serving[row.framework].dense
    return Estimate(added.passes * KERNELS.ttft_s + added.pass_s + added.first_s, added.steps * KERNELS.tpot_s)


def indifferent(row: Row, serving: Mapping[str, Serving]) -> Estimate:
    return KERNELS


def dense(row: Row) -> bool:
    return False


def fitted(*rows: Row, simulated: Callable[[Row, Mapping[str, Serving]], Estimate] = served) -> dict[str, Serving]:
    return fit(rows, 1, lambda text: None, Asked(simulated, dense))


def test_what_is_fitted_brings_simulated_rows_to_what_was_measured(tmp_path: Path) -> None:
    found = fitted(replace(kinds(tmp_path)[1], ttft_s=0.15, tpot_s=0.0135))
    added = found["vllm"].dense
    assert astuple(served(kinds(tmp_path)[1], found)) == pytest.approx((0.15, 0.0135))
    assert added.first_s == 0.05  # the same as `pass_s` here, with fewer numbers that are not 0
    assert found == {**NEUTRAL, "vllm": replace(NEUTRAL["vllm"], dense=added)}


def test_nothing_is_fitted_to_what_is_held_out(tmp_path: Path) -> None:
    held, other = (replace(each, ttft_s=0.15, tpot_s=0.0135) for each in kinds(tmp_path))
    assert fitted(held) == NEUTRAL
    assert fitted(other, *[replace(held, ttft_s=0.01 * number, tpot_s=0.1) for number in range(1, 9)]) == fitted(other)
    assert fitted(other) != NEUTRAL


def test_a_fit_begins_with_nothing_and_adds_nothing_that_rows_do_not_ask_for(tmp_path: Path) -> None:
    other = replace(kinds(tmp_path)[1], ttft_s=0.05, tpot_s=0.9)
    assert fitted(other, simulated=indifferent) == NEUTRAL
    asked: list[Added] = []

    def watched(row: Row, serving: Mapping[str, Serving]) -> Estimate:
        asked.append(serving[row.framework].dense)
        return KERNELS

    fitted(other, simulated=watched)
    assert asked[0] == NOTHING
    assert all(values[0] == getattr(NOTHING, name) for name, values in TRIED.items())
    assert {each.dense for each in NEUTRAL.values()} | {each.experts for each in NEUTRAL.values()} == {NOTHING}


def uncosted_on_h100(row: Row, serving: Mapping[str, Serving]) -> Estimate:
    if row.system == "h100_sxm":
        raise UncostedError("no data")
    return served(row, serving)


def test_a_kind_that_has_no_costs_does_not_stop_a_fit(tmp_path: Path) -> None:
    other = replace(kinds(tmp_path)[1], ttft_s=0.15, tpot_s=0.0135)
    without = row(tmp_path, system="h100_sxm")
    assert not without.held_out
    assert fitted(other, without, simulated=uncosted_on_h100) == fitted(other)
    assert fitted(without, simulated=uncosted_on_h100) == NEUTRAL


def ridge(row: Row, serving: Mapping[str, Serving]) -> Estimate:
    """As measured with two numbers one and two steps up; any other pair with that sum is better than all next to it."""
    added = serving[row.framework].dense
    one, other = TRIED["layer_s"].index(added.layer_s), TRIED["pass_s"].index(added.pass_s)
    return Estimate(row.ttft_s * (1 + abs(one + other - 3) + 0.1 * abs(one - other + 1)), row.tpot_s)


def test_a_number_is_traded_for_another_where_neither_is_better_alone(tmp_path: Path) -> None:
    added = fitted(kinds(tmp_path)[1], simulated=ridge)["vllm"].dense
    assert (added.layer_s, added.pass_s) == (TRIED["layer_s"][1], TRIED["pass_s"][2])


def test_a_measurement_that_a_table_repeats_counts_once(tmp_path: Path) -> None:
    other = replace(kinds(tmp_path)[1], ttft_s=0.15, tpot_s=0.01)
    two = [replace(other, ttft_s=0.11, concurrency=4), replace(other, ttft_s=0.11, concurrency=2)]
    assert fitted(*[other] * 9, *two)["vllm"].dense.first_s == fitted(*two)["vllm"].dense.first_s == 0.01
    assert fitted(other)["vllm"].dense.first_s == 0.05


def test_where_a_fit_differs_from_what_stands_is_told() -> None:
    assert differences(SERVING) == []
    other = {**SERVING, "vllm": replace(SERVING["vllm"], experts=replace(SERVING["vllm"].experts, first_s=0.42))}
    assert differences(other) == [f"vllm, experts: first_s 0.42, not {SERVING['vllm'].experts.first_s:g}"]


def test_what_stands_is_of_values_that_a_fit_tries() -> None:
    for serving in SERVING.values():
        for added in (serving.dense, serving.experts):
            assert all(getattr(added, name) in values for name, values in TRIED.items())
    assert {field.name for field in fields(Added)} == set(TRIED)


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
