"""Sampling on the device: the tokens of device/sampler.py for the same random numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import ctas_in_random_order
from test_sampler import CANDIDATES, FILTERS, HOT, Sequence, logits_of, slow_distribution
from torch import Tensor

from pdmux_ray.device.cuda.kernels.sampling import draw, greedy
from pdmux_ray.device.sampler import Sampler
from pdmux_ray.device.uniform import uniform
from pdmux_ray.types import SamplingParams
from tests.examples import tried

pytestmark = pytest.mark.cpu


def drawn(logits: Tensor, params: list[SamplingParams], numbers: list[float]) -> list[int]:
    temperature, top_p, min_p = (torch.tensor([getattr(p, n) for p in params]) for n in ("temperature", "top_p", "min_p"))
    top_k = torch.tensor([p.top_k for p in params], dtype=torch.int32)
    out = torch.full((len(params),), -1)
    draw(logits, torch.tensor(numbers, dtype=torch.float32), temperature.float(), top_k, top_p.float(), min_p.float(), out)
    return out.tolist()


@pytest.mark.parametrize("vocab", [2000, 4500])
@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
def test_a_row_gets_the_token_that_the_host_draws(params: SamplingParams, vocab: int) -> None:
    rows = [replace(params, seed=seed) for seed in range(3)]
    logits = logits_of(len(rows), spread=2.0, seed=5, vocab=vocab)
    sequences = [Sequence(p) for p in rows]
    expected = Sampler().sample(logits.clone(), sequences).tokens
    assert drawn(logits, rows, [uniform(p.seed, len(s.tokens)) for p, s in zip(rows, sequences, strict=True)]) == expected


params_of_a_row = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 7, 300, 5000]),
    top_p=st.sampled_from([0.05, 0.5, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.7]),
)


@settings(max_examples=tried(40), deadline=None)
@given(params_of_a_row, st.floats(0, 1, exclude_max=True, width=32), st.integers(0, 99), st.sampled_from([1, 5, 300, 4097]))
def test_a_token_is_where_its_number_falls_in_the_kept_mass(
    params: SamplingParams, number: float, seed: int, vocab: int
) -> None:
    """Also among equal logits: they follow each other by id."""
    logits = logits_of(1, spread=2.0, seed=seed, vocab=vocab).half().float()
    (token,) = drawn(logits, [params], [number])
    if params.greedy:
        assert token == int(logits.argmax())
        return
    expected = slow_distribution(logits[0], params)
    order = np.argsort(-logits[0].double().numpy(), kind="stable")
    if (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0) and vocab > CANDIDATES:
        best = logits[0] >= logits[0].sort(descending=True).values[CANDIDATES - 1]
        order = np.concatenate([order[: int(best.sum())], np.sort(order[int(best.sum()) :])])
    before = expected[order].cumsum()[int(np.flatnonzero(order == token)[0])] - expected[token]
    assert expected[token] > 0
    assert before - 1e-5 <= number <= before + expected[token] + 1e-5  # float32 sums


@pytest.mark.parametrize("beyond", [-1e-4, 1e-4, 1e-2])
def test_without_a_filter_the_best_candidates_come_first_and_then_the_others_by_id(beyond: float) -> None:
    logits = logits_of(1, vocab=700)
    best = np.argsort(-logits[0].numpy(), kind="stable")
    order = np.concatenate([best[:CANDIDATES], np.sort(best[CANDIDATES:])])
    mass = torch.softmax(logits[0].double(), 0).numpy()[order].cumsum()
    number = float(mass[CANDIDATES - 1]) + beyond * float(1 - mass[CANDIDATES - 1])
    assert drawn(logits, [HOT], [number]) == [order[np.searchsorted(mass, number, side="right")]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 97, 4096, 9001])
def test_greedy_takes_the_first_best_token(vocab: int, dtype: torch.dtype) -> None:
    logits = logits_of(3, vocab=vocab).to(dtype)
    logits[1, vocab // 2 :] = 100.0
    logits[2] = -torch.inf
    out = torch.full((3,), -1)
    greedy(logits, out)
    assert out.tolist() == [int(logits[0].argmax()), vocab // 2, 0]
    assert drawn(logits.float(), [replace(HOT, temperature=0.0)] * 3, [0.5] * 3) == out.tolist()


def test_tokens_that_are_barred_never_come() -> None:
    logits = torch.full((4, 50), -torch.inf)
    logits[:, 20:23] = 1.0
    assert drawn(logits, [HOT] * 4, [0.0, 0.5, 0.99, 1.0]) == [20, 21, 22, 22]


def test_rows_may_lie_apart_in_memory() -> None:
    wide = logits_of(2, vocab=300)
    assert drawn(wide[:, :200], [HOT] * 2, [0.3, 0.8]) == drawn(wide[:, :200].contiguous(), [HOT] * 2, [0.3, 0.8])


def test_a_row_gets_the_same_token_whatever_else_is_in_the_batch_and_in_any_order_of_ctas() -> None:
    params = [*FILTERS.values()][:5]
    logits, numbers = logits_of(5, vocab=500), [0.1, 0.3, 0.5, 0.7, 0.9]
    together = drawn(logits, params, numbers)
    with ctas_in_random_order(3):
        assert drawn(logits, params, numbers) == together
    assert [drawn(logits[i : i + 1], params[i : i + 1], numbers[i : i + 1])[0] for i in range(5)] == together
