"""Every check, in the order in which they run: what is right first, then how fast, and last what that is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pdmux_ray.errors import ConfigError
from pdmux_ray.gpu_check.attention import attention
from pdmux_ray.gpu_check.contexts import graphs, levels
from pdmux_ray.gpu_check.greedy import greedy
from pdmux_ray.gpu_check.headline import headline
from pdmux_ray.gpu_check.lab import Lab
from pdmux_ray.gpu_check.machine import machine
from pdmux_ray.gpu_check.operations import operations
from pdmux_ray.gpu_check.report import Row
from pdmux_ray.gpu_check.sampling import sampling
from pdmux_ray.gpu_check.steps import beside, decode, host, prefill, switch


@dataclass(frozen=True, slots=True)
class Check:
    """`run` yields each result as soon as it is known. `seconds`: about, on an H200."""

    name: str
    title: str
    seconds: float
    run: Callable[[Lab], Iterator[Row]]


CHECKS = (
    Check("machine", "what this machine is, and what it gives", 5, machine),
    Check("levels", "the SMs that each lane really has", 4, levels),
    Check("graphs", "captured kernels belong to their lane", 2, graphs),
    Check("kernels", "operations against float32 references", 20, operations),
    Check("attention", "prefill attention by each library that is installed", 5, attention),
    Check("sampling", "device-side sampling against the host's", 5, sampling),
    Check("greedy", "the same greedy tokens in every mode", 20, greedy),
    Check("decode", "decode step, alone", 25, decode),
    Check("prefill", "prefill, by layers, on each level", 10, prefill),
    Check("beside", "decode beside a running prefill", 20, beside),
    Check("switch", "a change of the split", 3, switch),
    Check("host", "what the host spends on a decode step", 6, host),
    Check("headline", "AUTO against chunked prefill, open loop", 155, headline),
)
SLOW = ("headline",)  # left out of a quick run, unless it is named


def chosen(names: str | None, quick: bool) -> list[Check]:
    """`names`: as given with --only. Raises ConfigError for one that there is not."""
    if names is None:
        return [check for check in CHECKS if not (quick and check.name in SLOW)]
    wanted = [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in {check.name for check in CHECKS}]:
        raise ConfigError(f"no check is named {', '.join(unknown)}; there are {', '.join(check.name for check in CHECKS)}")
    return [check for check in CHECKS if check.name in wanted]
