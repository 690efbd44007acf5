from __future__ import annotations

from pathlib import Path

import pytest

from pdmux_ray.bench.load.compare import rejudge
from pdmux_ray.bench.load.comparison import differences, goodput_ratio
from pdmux_ray.bench.load.offer import Terms
from pdmux_ray.bench.load.session import RunRecord, Session
from pdmux_ray.metrics.goodput import Slo
from pdmux_ray.metrics.lifeline import Lifeline
from tests.unit.metrics.lifelines import served

TERMS = Terms(Slo(ttft_s=0.5))


def session_of(directory: Path, name: str, good: dict[float, float], terms: Terms = TERMS) -> Session:
    """40 requests at each rate, of which the share that is given is good."""
    session = Session(name, directory / name, terms, {"load": "open loop"})
    for rate, share in good.items():
        session.add(RunRecord(rate, [request(n, n < share * 40) for n in range(40)]))
    return session


def request(due_s: float, good: bool) -> Lifeline:
    return served(due_s + (0.1 if good else 0.9), due_s=due_s)


def test_goodput_is_compared_with_an_interval(tmp_path: Path) -> None:
    first = session_of(tmp_path, "a", {1.0: 1.0, 2.0: 0.8})
    other = session_of(tmp_path, "b", {1.0: 1.0, 2.0: 1.0, 4.0: 0.8})
    found = goodput_ratio(other, first)
    assert found.ratio == pytest.approx(2.0)
    assert found.ci is not None
    low, high = found.ci
    assert high is not None
    assert low <= 2.0 <= high
    assert str(found).endswith(f"95 % interval {low:.2f} to {high:.2f}")


def test_a_target_equals_itself_in_every_resample(tmp_path: Path) -> None:
    first, same = (session_of(tmp_path, name, {1.0: 1.0, 2.0: 0.7}) for name in "ab")
    assert goodput_ratio(same, first).ci == (1.0, 1.0)


def test_goodput_is_compared_per_device(tmp_path: Path) -> None:
    first = session_of(tmp_path, "a", {1.0: 1.0})
    two = session_of(tmp_path, "b", {1.0: 1.0}, Terms(TERMS.slo, devices=2))
    assert goodput_ratio(two, first).ratio == pytest.approx(0.5)


def test_over_one_that_holds_no_rate_the_interval_begins_at_the_lowest_and_has_no_end(tmp_path: Path) -> None:
    first = session_of(tmp_path, "a", {1.0: 0.5})
    found = goodput_ratio(session_of(tmp_path, "b", {2.0: 1.0}), first)
    assert (found.ratio, found.ci) == (None, (2.0, None))


def test_there_is_no_ratio_to_what_is_unknown(tmp_path: Path) -> None:
    first = session_of(tmp_path, "a", {})
    assert "no ratio" in str(goodput_ratio(session_of(tmp_path, "b", {1.0: 1.0}), first))


def test_targets_that_were_asked_something_else_are_told_apart() -> None:
    asked = {"url": "http://a", "seed": "0", "workload": "sharegpt"}
    assert differences(asked | {"url": "http://b"}, asked) == []
    assert differences(asked | {"seed": "1"}, asked) == ["seed is '1', not '0'"]
    assert differences({"url": "x", "seed": "0"}, asked) == ["workload is 'not stated', not 'sharegpt'"]


def test_a_finished_run_is_judged_again_from_its_samples(tmp_path: Path) -> None:
    session_of(tmp_path, "a", {1.0: 0.5})
    session = Session.read("a", tmp_path / "a")
    assert session.summary().runs[0].good_fraction == 0.5
    rejudge(session, Terms(Slo(ttft_s=1.0), 0.99))
    assert (session.summary().runs[0].good_fraction, session.summary().attainment) == (1.0, 0.99)
    assert "judged here by" in session.notes[-1]
    assert Session.read("a", tmp_path / "a").summary().runs[0].good_fraction == 0.5  # its files stay as they are
