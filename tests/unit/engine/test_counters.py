"""What an engine tells the metrics."""

from __future__ import annotations

import json

from pdmux_ray.types import Mode

from .test_requests import drain
from .world import PAGE, Worlds, limits, request


def test_the_figures_count_what_the_engine_did(worlds: Worlds) -> None:
    engine, _ = worlds(limits(mode=Mode.PREFILL_FIRST))
    for name in ("first", "again"):
        engine.submit(request(name, [1] * 2 * PAGE, max_tokens=3))
        drain(engine)
    engine.submit(request("gone"))
    engine.abort(["gone"])
    drain(engine)
    figures = engine.counters.figures()
    assert json.loads(json.dumps(figures)) == figures
    assert {
        name: {k: n for k, n in value.items() if n} if isinstance(value, dict) else value for name, value in figures.items()
    } == {
        "pdmux_steps_total": {"prefill_whole": 2, "decode_only": 4},
        "pdmux_mode_choices_total": {},  # there was none: no lanes
        "pdmux_mode_steps_total": {},
        "pdmux_bursts_total": {},
        "pdmux_admissions_total": {},
        "pdmux_engine_finished_total": {"length": 2, "abort": 1},
        "pdmux_prefill_tokens_total": 3 * PAGE,
        "pdmux_prefix_hit_tokens_total": PAGE,
        "pdmux_engine_generated_tokens_total": 6,
        "pdmux_wasted_tokens_total": 0,
        "pdmux_preemptions_total": 0,
        "pdmux_page_evictions_total": 0,
        "pdmux_fetch_choices_total": {},  # nor any other instance
        "pdmux_fetches_total": {},
        "pdmux_exports_total": {},
        "pdmux_kv_received_tokens_total": 0,
        "pdmux_kv_used_tokens_total": 0,
    }


def test_every_reason_has_a_figure_from_the_start_but_idle_is_no_step(worlds: Worlds) -> None:
    steps = worlds()[0].counters.figures()["pdmux_steps_total"]
    assert isinstance(steps, dict)
    assert "decode_no_pages" in steps
    assert "idle" not in steps


def test_preemptions_and_evictions_are_counted(worlds: Worlds) -> None:
    engine, _ = worlds(limits(context_length=32), pages=10)
    for index in range(4):
        engine.submit(request(f"r{index}", [index] * 8, max_tokens=20))
    drain(engine)
    figures = engine.counters.figures()
    assert figures["pdmux_preemptions_total"] == engine.counters.preemptions > 0
    assert figures["pdmux_page_evictions_total"] == engine._pool.evictions > 0
