"""Triton's interpreter, as the tests need it."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction


def take_over() -> None:
    """Makes Triton's own functions (`tl.sum`) interpreted, should Triton have been imported before the interpreter was asked
    for. The kernels themselves are asked about when they are imported, later."""
    if not isinstance(tl.sum, JITFunction):
        return
    standard = importlib.reload(tl.standard)
    for name in vars(tl).keys() & vars(standard).keys():
        if isinstance(getattr(tl, name), JITFunction):
            setattr(tl, name, getattr(standard, name))


def _widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16, as it is kept, to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrowed(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


@contextmanager
def exact_bfloat16() -> Iterator[None]:
    """The interpreter keeps bfloat16 as integers: it multiplies those as such, and cuts off where a GPU rounds."""
    builder: Any = interpreter.InterpreterBuilder
    multiply, cast = builder.create_dot, builder.cast_impl

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        kinds = (source.dtype.scalar, to.scalar)
        if kinds == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(_widened(source.data), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(_narrowed(source.data), tl.bfloat16)
        return cast(self, source, to)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (cast_impl(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *rest)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    try:
        yield
    finally:
        builder.create_dot, builder.cast_impl = multiply, cast


@contextmanager
def loops_over_scalars() -> Iterator[None]:
    """In the interpreter a scalar is an array of one, which numpy takes for no number any more: Triton 3.6 relies on that."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, *rest: Any) -> None:
        patch(tensor, *rest)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_tensor
    try:
        yield
    finally:
        interpreter._patch_lang_tensor = patch


@contextmanager
def patch_once_a_launch() -> Iterator[None]:
    """The interpreter replaces Triton's functions anew for each call within a kernel, which takes most of the time. Once for
    each set of modules that a function sees is enough."""
    executor: Any = interpreter.GridExecutor
    patch, launch, done = interpreter._patch_lang, executor.__call__, set[frozenset[int]]()

    def patch_new(fn: Any) -> Any:
        seen = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if seen in done:
            return None  # which a call within a kernel does not look at
        done.add(seen)
        return patch(fn)

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang, executor.__call__ = patch_new, launch_afresh
    try:
        yield
    finally:
        interpreter._patch_lang, executor.__call__ = patch, launch


@contextmanager
def ctas_in_random_order(seed: int) -> Iterator[None]:
    """Launches run their CTAs in another order than that of their numbers."""
    builder: Any = interpreter.InterpreterBuilder
    place = builder.set_grid_idx
    rng, orders = random.Random(seed), dict[tuple[int, int, int], list[int]]()

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        wide, high, deep = self.grid_dim
        if (x, y, z) == (0, 0, 0):
            orders[self.grid_dim] = rng.sample(range(wide * high * deep), wide * high * deep)
        at, z = divmod(orders[self.grid_dim][(x * high + y) * deep + z], deep)
        place(self, *divmod(at, high), z)

    builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        builder.set_grid_idx = place
