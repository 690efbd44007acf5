from __future__ import annotations

from pathlib import Path

import pytest

from pdmux_ray.cli import main

CONFIG = """
applications:
  - import_path: pdmux_ray.serve.app:build_app
    args: {engine: {device: fake}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (path := tmp_path / "fake.yaml").write_text(CONFIG)
    return path


def test_a_made_up_device_is_not_profiled(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(config), "--out", str(tmp_path / "p.json")]) == 2
    assert "nothing to measure" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [config]


def test_what_is_set_counts_instead_of_what_the_file_says(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    options = ["--set", "engine.device=cpu", "--set", f"model={tmp_path / 'empty'}"]
    assert main(["profile", str(config), *options, "--out", str(tmp_path / "p.json")]) == 2
    assert f"{tmp_path / 'empty'} lacks config.json" in capsys.readouterr().err


def test_a_key_that_is_not_there_cannot_be_set(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(config), "--set", "modle=x", "--out", str(tmp_path / "p.json")]) == 2
    assert "did you mean 'model'?" in capsys.readouterr().err


def test_a_profile_that_is_there_is_kept(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "p.json").write_text("hours of work")
    assert main(["profile", str(config), "--out", str(path)]) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert path.read_text() == "hours of work"
