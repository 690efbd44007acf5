"""The contract of co-residency, as far as the text of the kernels shows it: no CTA waits for another.

`pdmux_ray/device/cuda/kernels/__init__.py` states it; that results do not depend on the order of CTAs is tested beside the
kernels.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .sources import files, tree

KERNELS = files("pdmux_ray/device/cuda/kernels")
WAITING = ("atomic", "barrier", "inline_asm", "cooperative", "volatile", "debug_barrier", "num_sms", "get_device_properties")


def names(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.keyword) and part.arg:
            yield part.arg


def forbidden(source: ast.AST) -> list[str]:
    """What could make a CTA wait for another, or a launch depend on the whole device."""
    return [name for name in names(source) if any(word in name for word in WAITING)]


def spins(source: ast.AST) -> list[int]:
    """Lines of loops on a condition that nothing in the loop assigns: those wait for memory to change."""
    loops = [node for node in ast.walk(source) if isinstance(node, ast.While)]
    lines = []
    for loop in loops:
        assigned = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        read = {n.id for n in ast.walk(loop.test) if isinstance(n, ast.Name)}
        if not read & assigned or "load" in set(names(loop.test)):
            lines.append(loop.lineno)
    return lines


def test_there_are_kernels() -> None:
    assert {"decode_attention", "prefill_attention", "rope_kv", "rms_norm", "silu_mul", "sampling"} <= {p.stem for p in KERNELS}


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_no_kernel_waits_for_another_cta_or_asks_how_large_the_device_is(path: Path) -> None:
    assert forbidden(tree(path)) == []
    assert spins(tree(path)) == []


@pytest.mark.parametrize(
    "code",
    ["tl.atomic_add(x, 1)", "tl.load(x, volatile=True)", "k[(n,)](x, launch_cooperative_grid=True)", "tl.debug_barrier()"],
)
def test_the_contract_has_teeth(code: str) -> None:
    assert forbidden(ast.parse(code)) != []


def test_a_lock_would_be_seen() -> None:
    assert spins(ast.parse("while tl.load(lock) == 0:\n    pass")) == [1]
    assert spins(ast.parse("while at < end:\n    at = at + 1")) == []
