from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdmux_ray.errors import ConfigError
from pdmux_ray.latency.identity import ProfileMismatchError
from pdmux_ray.latency.profile import MeasuredPoint, Profile, ProfileQualityError, coverage, load, read

from .lawful import IDENTITY


def test_a_written_profile_is_read_back_and_predicts_the_same(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile.write(path)
    again = load(path, IDENTITY)
    assert again == profile
    assert again.costs().decode(5, 900, 1, 1) == profile.costs().decode(5, 900, 1, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def test_elsewhere_it_is_an_error_that_says_what_differs(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile.write(path)
    other = IDENTITY.model_copy(update={"device": "another processor", "torch": "9.9"})
    with pytest.raises(ProfileMismatchError) as caught:
        load(path, other)
    message = str(caught.value)
    assert "device: profiled 'a formula (2 cores)', here 'another processor'" in message
    assert "torch: profiled 'none', here '9.9'" in message
    assert "dtype" not in message


def test_a_profile_that_does_not_tell_its_threads_settings_is_refused(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile.write(path)
    with pytest.raises(ProfileMismatchError, match="settings: profiled 'not recorded', here 'GOMP_SPINCOUNT=300'"):
        load(path, IDENTITY.model_copy(update={"settings": "GOMP_SPINCOUNT=300"}))


def test_a_profile_whose_bound_does_not_hold_is_not_written(profile: Profile, tmp_path: Path) -> None:
    qualities = tuple(replace(q, coverage=0.9) if q.part.startswith("decode") else q for q in profile.qualities)
    poor = profile.model_copy(update={"qualities": qualities})
    with pytest.raises(ProfileQualityError, match=r"only 90.0% of the held-out decode times"):
        poor.write(tmp_path / "profile.json")
    assert list(tmp_path.iterdir()) == []


def test_a_profile_in_which_more_units_are_slower_is_neither_written_nor_read(profile: Profile, tmp_path: Path) -> None:
    lane = profile.parameters.decode
    rising = replace(profile.parameters, decode=replace(lane, terms=lane.terms[::-1]))
    wrong = profile.model_copy(update={"parameters": rising})
    with pytest.raises(ProfileQualityError, match="slower"):
        wrong.write(tmp_path / "profile.json")
    (tmp_path / "edited.json").write_text(wrong.model_dump_json())
    with pytest.raises(ConfigError, match="slower"):
        read(tmp_path / "edited.json")


def test_a_machine_that_was_slower_on_more_units_gives_no_profile(profile: Profile, tmp_path: Path) -> None:
    def slow(point: MeasuredPoint) -> MeasuredPoint:
        factor = 2.2 if (point.kind, point.units) == ("decode", 2) else 1.0
        return point.model_copy(update={"percentiles_s": tuple(factor * seconds for seconds in point.percentiles_s)})

    wrong = profile.model_copy(update={"points": tuple(map(slow, profile.points))})
    with pytest.raises(ProfileQualityError, match=r"decode was 1\.\d\d times as slow on 2 units as on 1"):
        wrong.write(tmp_path / "profile.json")


def test_coverage_counts_times_not_parts(profile: Profile) -> None:
    parts = [q for q in profile.qualities if q.part.startswith("prefill")]
    inside = sum(q.coverage * q.samples for q in parts)
    assert coverage(profile.qualities, "prefill") == pytest.approx(inside / sum(q.samples for q in parts))
    assert coverage(profile.qualities, "prefill") >= 0.97


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}'])
def test_a_file_that_is_no_profile_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match="is no profile of this version"):
        read(tmp_path / "p.json")
    with pytest.raises(ConfigError, match="cannot read the profile"):
        read(tmp_path / "absent.json")
