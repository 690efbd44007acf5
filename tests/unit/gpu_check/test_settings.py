"""The plain settings are the configuration's, field by field."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pdmux_ray.config import CudaConfig, EngineConfig, MultiplexConfig
from pdmux_ray.gpu_check.settings import Cuda, Multiplex, Settings

GROUPS = {"multiplex", "cuda"}
OF_OTHER_DEVICES = {"threads", "fake", "transfer"}
OF_FILES = {"profile"}


@pytest.mark.parametrize(
    ("plain", "configured", "absent"),
    [
        (Settings(), EngineConfig(), OF_OTHER_DEVICES),
        (Multiplex(), MultiplexConfig(), OF_FILES),
        (Cuda(), CudaConfig(), set()),
    ],
)
def test_fields_and_defaults_are_the_configurations(plain: Any, configured: Any, absent: set[str]) -> None:
    names = {field.name for field in dataclasses.fields(plain)}
    assert names == set(type(configured).model_fields) - absent
    assert {n: getattr(plain, n) for n in names - GROUPS} == {n: getattr(configured, n) for n in names - GROUPS}


def test_limits_of_an_engine_are_made_of_them() -> None:
    limits = Settings(chunk_tokens=7, multiplex=Multiplex(ttft_s=2.0)).limits(100, 50)
    assert (limits.context_length, limits.vocab_size, limits.chunk_tokens, limits.ttft_objective.of(5)) == (100, 50, 7, 2.0)
    assert Settings(context_length=40).limits(100, 50).context_length == 40
