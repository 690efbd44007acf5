"""Kernels run in Triton's interpreter here: on the CPU, one CTA after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Triton looks when it is imported, and for each kernel when that is; nobody else does. So: before a test module imports either.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def interpreted() -> Iterator[None]:
    from interpreter import exact_bfloat16, loops_over_scalars, patch_once_a_launch, take_over

    take_over()
    with exact_bfloat16(), loops_over_scalars(), patch_once_a_launch():
        yield
