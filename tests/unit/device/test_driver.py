from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import pytest

from pdmux_ray.device.cuda.driver import CudaError, Driver, NoDriverError, open_driver, widen_queues


def test_without_the_bindings_the_error_says_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(NoDriverError, match=r"pip install 'pdmux-ray\[cuda\]'.*cpu-mux.yaml"):
        open_driver()


@pytest.mark.parametrize(("before", "after"), [("", "32"), ("4", "4")])
def test_more_work_queues_are_asked_for_unless_the_environment_says_how_many(
    monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", before)
    if not before:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    widen_queues()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == after


@dataclass
class Group:
    smCount: int = 0
    coscheduledSmCount: int = 0


class OneGroupBindings:
    """What cuda-bindings 13.1 and 13.2 have of a structured split: one group, where later ones take a list."""

    CU_DEV_SM_RESOURCE_GROUP_PARAMS = Group

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, 13_020

    def cuDevSmResourceSplit(self, groups: int, sms: int, flags: int, group: Group) -> tuple[int, list[Group], int]:
        if not isinstance(group, Group):
            raise TypeError("Argument 'groupParams' has incorrect type")
        return 0, [group] * groups, sms - group.smCount


def test_bindings_that_take_one_group_get_one() -> None:
    driver = Driver(OneGroupBindings())
    assert driver.structured
    assert driver.split_structured(132, 24, together=8) == (Group(24, 8), 108)


class OlderBindings:
    """What bindings do with a result that the driver has and they have not: 12.8 and 13.0."""

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, 13_000

    def cuStreamQuery(self, stream: int) -> tuple[int]:
        raise ValueError("917 is not a valid CUresult") if stream else KeyError(917)

    def cuStreamSynchronize(self, stream: int) -> tuple[int]:
        raise ValueError(f"{stream} is no stream")


@pytest.mark.parametrize("stream", [0, 1])
def test_a_result_that_the_bindings_do_not_know_is_a_number(stream: int) -> None:
    with pytest.raises(CudaError, match=r"cuStreamQuery failed with CUresult \(917\)") as failure:
        Driver(OlderBindings()).call("cuStreamQuery", stream)
    assert failure.value.code == 917


def test_an_argument_that_the_bindings_refuse_is_no_result() -> None:
    with pytest.raises(ValueError, match="no stream"):
        Driver(OlderBindings()).call("cuStreamSynchronize", "this")
