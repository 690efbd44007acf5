"""What an instance says when it cannot have peers; `tests/cpu/test_peers.py` has the rest."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer.api import Limits
from pdmux_ray.clock import WallClock
from pdmux_ray.config import TransferConfig
from pdmux_ray.engine.fake_runner import FakeRunner
from pdmux_ray.engine.handoffs import transfer_limits
from pdmux_ray.errors import ConfigError
from pdmux_ray.serve.peers import Who, model_digest, open_peers
from pdmux_ray.types import ModelFacts

WHO = Who("d", "127.0.0.1", "m", "the fleet's secret")
FACTS = ModelFacts(4096, 32_000, frozenset({2}))


def test_without_nixl_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("kv_transfer.nixl", "kv_transfer.nixl_agent"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "nixl", None)  # importing it fails
    with pytest.raises(ConfigError, match=r"install the extra pdmux-ray\[nixl\]"):
        open_peers(WHO, FakeRunner(4, 4, 0.0, 0.0, WallClock()), FACTS, TransferConfig())


def test_a_device_whose_kv_others_cannot_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot share its KV"):
        open_peers(WHO, object(), FACTS, TransferConfig())


def test_a_model_is_told_by_its_config_and_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3_000_000))
    first, random = model_digest(tmp_path, "weights"), model_digest(tmp_path, "dummy")
    weights.write_bytes(bytes(2_999_999) + b"\1")
    assert model_digest(tmp_path, "weights") != first
    assert model_digest(tmp_path, "dummy") == random != first
    (tmp_path / "config.json").write_text("{ }")
    assert model_digest(tmp_path, "dummy") != random


def test_a_model_whose_kv_depends_on_more_than_its_tokens_has_no_peers() -> None:
    facts = replace(FACTS, prefixes_are_shareable=False)
    with pytest.raises(ConfigError, match="dynamic RoPE scaling"):
        open_peers(WHO, FakeRunner(4, 4, 0.0, 0.0, WallClock()), facts, TransferConfig())


def test_who_an_instance_is_can_be_logged_without_its_secret() -> None:
    assert "secret" not in repr(WHO)


def test_a_transfer_is_as_patient_without_a_configuration_as_with_its_defaults() -> None:
    assert transfer_limits(TransferConfig()) == Limits()
