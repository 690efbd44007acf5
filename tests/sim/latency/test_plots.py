from __future__ import annotations

from pdmux_ray.latency.plots import accuracy_chart, context_chart, decode_chart, prefill_chart, sections
from pdmux_ray.latency.profile import Profile
from pdmux_ray.report.page import Notes, Table


def test_the_page_tells_what_it_is_of_and_how_good_it_is(profile: Profile) -> None:
    first, *_, last = sections(profile)
    (table,), (notes,) = first.blocks, last.blocks
    assert isinstance(table, Table)
    assert isinstance(notes, Notes)
    assert "decode on 1 beside 1" in [row.cells[0] for row in table.rows]
    assert "model: lawful, config 0" in notes.lines


def test_every_chart_has_what_was_measured_and_what_the_model_says(profile: Profile) -> None:
    for chart in (decode_chart(profile), prefill_chart(profile)):
        line, spread, marks = (layer["data"]["values"] for layer in chart.spec["layer"])
        assert {row["series"] for row in line} == {key.label for key in chart.legend}
        assert {row["series"] for row in marks} == {key.label for key in chart.legend}
        assert all(row["low"] <= row["y"] <= row["high"] for row in spread)
    assert context_chart(profile).spec["layer"][2]["data"]["values"]


def test_held_out_medians_lie_along_the_diagonal(profile: Profile) -> None:
    marks = accuracy_chart(profile).spec["layer"][1]["data"]["values"]
    near = [abs(mark["y"] / mark["x"] - 1) < 0.15 for mark in marks]
    assert len(marks) > 50
    assert sum(near) / len(near) > 0.9
