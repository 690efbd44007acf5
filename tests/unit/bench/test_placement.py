from __future__ import annotations

import yaml

from pdmux_ray.bench.placement import claims_table, compared, lines, still, table
from pdmux_ray.bench.placement_fleet import LONG_IN, LONG_OUT, PLACED, STATIC, Outcome, Sample, Setting, planned
from pdmux_ray.bench.placement_page import page, requests_chart
from pdmux_ray.bench.prometheus_server import configuration
from pdmux_ray.config import parse_app_config
from pdmux_ray.metrics.lifeline import Lifeline

TURN_S = 10.0


def outcome(setting: Setting, good: int, late: int, roles: list[tuple[float, int]], failed: int = 0) -> Outcome:
    """Requests a second apart: `good` ones, then late ones, then failed ones."""
    lifelines = []
    for index in range(good + late + failed):
        life = Lifeline(100.0 + index, prompt_tokens=10, asked_tokens=1)
        if index < good + late:
            life.tokens_arrived(life.due_s + (0.1 if index < good else 60.0))
            life.complete(life.token_s[0], "length")
        else:
            life.fail(life.due_s, "refused")
        lifelines.append(life)
    return Outcome(setting, lifelines, 100.0, [Sample(at, prefill, 4 - prefill) for at, prefill in roles])


OURS = outcome(PLACED, 18, 2, [(0.0, 3), (TURN_S, 3), (TURN_S + 12, 1)])
WORSE = [outcome(STATIC[0], 10, 10, []), outcome(STATIC[1], 5, 15, [])]


def test_the_load_turns_from_long_prompts_to_long_answers() -> None:
    requests = planned([(LONG_IN, 10.0), (LONG_OUT, 10.0)], 0)
    first = [each.ask for each in requests if each.due_s < 10.0]
    second = [each.ask for each in requests if each.due_s >= 10.0]
    assert (len(first), len(second)) == (40, 29)
    assert min(len(ask.prompt) for ask in first) > 10 * max(len(ask.prompt) for ask in second)
    assert min(ask.output_tokens or 0 for ask in second) > 10 * max(ask.output_tokens or 0 for ask in first)
    assert requests == planned([(LONG_IN, 10.0), (LONG_OUT, 10.0)], 0)


def test_every_setting_is_a_configuration_of_four_instances() -> None:
    for setting in (PLACED, *STATIC):
        config = parse_app_config(yaml.safe_load(yaml.safe_dump(setting.args("http://127.0.0.1:9090"))))
        assert len(config.roles) == 4
        assert config.placement.enabled is setting.placed


def test_what_must_hold_is_held_against_the_best_ratio_that_stays() -> None:
    assert [(claim.found, claim.holds) for claim in compared([OURS, *WORSE], TURN_S)] == [
        ("12.0", True),
        ("0 of 20", True),
        ("1.80", True),
    ]
    missed = compared([outcome(PLACED, 12, 7, [(0.0, 3), (TURN_S + 31, 1)], failed=1), *WORSE], TURN_S)
    assert [claim.holds for claim in missed] == [False, False, False]


def test_a_change_before_the_turn_is_none_that_it_caused() -> None:
    early = outcome(PLACED, 20, 0, [(0.0, 2), (1.0, 3), (40.0, 3)])
    assert not compared([early, *WORSE], TURN_S)[0].holds


def test_a_load_that_stays_must_move_nothing() -> None:
    assert still("no change", outcome(PLACED, 20, 0, [(0.0, 3), (10.0, 3)])).holds
    assert not still("no change", OURS).holds
    assert not still("no change", outcome(PLACED, 20, 0, [])).holds, "nobody looked"
    assert not still("no change", outcome(PLACED, 19, 0, [(0.0, 3)], failed=1)).holds


def test_the_tables_have_a_row_for_each_setting_and_claim() -> None:
    text = "\n".join(lines(table("Served", [OURS, *WORSE], TURN_S)) + lines(claims_table(compared([OURS, *WORSE], TURN_S))))
    assert "| placed | 18 | 20 | 0 | 0.95 | 12.0 | 22 |" in text
    assert "| no request fails | 0 of 20 | holds |" in text


def test_the_page_shows_every_request_and_the_turn() -> None:
    rows = requests_chart(OURS, TURN_S, 20.0).spec["layer"][0]["data"]["values"]
    assert sum(row["n"] for row in rows) == 20
    assert {row["cause"] for row in rows} == {"good", "late or slow"}
    shown = page([OURS, *WORSE], TURN_S, [table("Served", [OURS], TURN_S)], "lead")
    assert "placed: instances by role" in shown


def test_prometheus_is_told_where_the_targets_and_the_rules_are() -> None:
    found = yaml.safe_load(yaml.safe_dump(configuration("http://127.0.0.1:8000/", 2.0)))
    assert found["scrape_configs"][0]["http_sd_configs"][0]["url"] == "http://127.0.0.1:8000/metrics/targets"
    assert found["global"]["scrape_interval"] == "2000ms"
    assert found["rule_files"][0].endswith("rules.yaml")
