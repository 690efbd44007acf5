from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmux_ray.latency.nonneg import falling_nnls, nnls
from tests.examples import tried


def test_terms_that_explain_everything_are_found() -> None:
    rng = np.random.default_rng(1)
    rows, truth = rng.random((40, 5)), np.array([3.0, 0.0, 1e-6, 2.0, 0.5])
    assert nnls(rows, rows @ truth) == pytest.approx(truth, abs=1e-9)


def test_a_term_that_least_squares_would_make_negative_is_zero() -> None:
    rows = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    fixed, slope = nnls(rows, np.array([3.0, 2.0, 1.0]))
    assert slope == 0
    assert fixed == pytest.approx(2.0)


@settings(max_examples=tried(60), deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 25), st.integers(1, 8))
def test_no_neighbour_of_the_answer_is_better(seed: int, count: int, terms: int) -> None:
    rng = np.random.default_rng(seed)
    rows, targets = rng.normal(size=(count, terms)), rng.normal(size=count)
    answer = nnls(rows, targets)
    assert (answer >= 0).all()
    gradient = rows.T @ (rows @ answer - targets)
    assert (gradient >= -1e-6).all()  # to raise any term is no gain, nor is to lower one that is not 0
    assert gradient[answer > 0] == pytest.approx(0.0, abs=1e-6)


@settings(max_examples=tried(40), deadline=None)
@given(st.integers(0, 10_000))
def test_terms_never_rise_with_the_units_whatever_was_measured(seed: int) -> None:
    rng = np.random.default_rng(seed)
    level_of = [int(level) for level in rng.choice([1, 2, 4], size=30)] + [1, 2, 4]
    rows, targets = rng.random((33, 3)), rng.random(33) + 0.1
    terms, shared = falling_nnls([1, 2, 4], level_of, rows, np.ones((33, 1)), targets)
    assert (np.diff(terms, axis=0) <= 1e-12).all()
    assert (terms >= 0).all()
    assert (shared >= 0).all()
