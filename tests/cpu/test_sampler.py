"""The sampler against slow and obvious implementations, and against itself in another batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pdmux_ray.device.penalties import Penalties
from pdmux_ray.device.sampler import CANDIDATES, MORE_CANDIDATES, Sampler
from pdmux_ray.device.uniform import uniform
from pdmux_ray.types import SamplingParams

pytestmark = pytest.mark.cpu

VOCAB = 2000
EOS = 7
HOT = SamplingParams(max_tokens=100, temperature=1.0, seed=1)


@dataclass
class Sequence:
    params: SamplingParams
    tokens: list[int] = field(default_factory=lambda: [3, 5, 3, 8])
    prompt_tokens: int = 2
    request_id: str = "r"
    pages: tuple[int, ...] = ()

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.params.stop_token_ids) | (frozenset() if self.params.ignore_eos else {EOS})


def logits_of(rows: int, spread: float = 3.0, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def sample_one(logits: Tensor, sequence: Sequence) -> int:
    return Sampler().sample(logits.clone()[None], [sequence]).tokens[0]


def slow_distribution(logits: Tensor, params: SamplingParams) -> np.ndarray:
    """Probabilities of all tokens after temperature, top_k, top_p and min_p, by sorting the whole row."""
    scaled = logits.double().numpy() / params.temperature
    order = np.argsort(-scaled, kind="stable")
    keep = order[: params.top_k] if params.top_k else order
    p = np.exp(scaled[keep] - scaled[keep[0]])
    p /= p.sum()
    count = int(np.searchsorted(p.cumsum(), params.top_p)) + 1 if params.top_p < 1 else len(p)
    p, keep = p[:count], keep[:count]
    p, keep = p[p >= params.min_p * p[0]], keep[p >= params.min_p * p[0]]
    full = np.zeros(len(scaled))
    full[keep] = p / p.sum()
    return full


FILTERS = {
    "temperature alone": HOT,
    "cold": replace(HOT, temperature=0.5),
    "hot": replace(HOT, temperature=1.9),
    "top_k": replace(HOT, top_k=20),
    "top_k beyond the candidates": replace(HOT, temperature=2.0, top_k=CANDIDATES + 300),
    "top_k beyond the candidates, then top_p": replace(HOT, top_k=CANDIDATES + 44, top_p=0.5),
    "top_p": replace(HOT, top_p=0.8),
    "nucleus beyond the candidates": replace(HOT, temperature=2.0, top_p=0.95),
    "min_p": replace(HOT, min_p=0.05),
    "min_p beyond the candidates": replace(HOT, temperature=2.0, min_p=0.001),
    "all together": replace(HOT, temperature=1.5, top_k=200, top_p=0.9, min_p=0.01),
}


@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
def test_tokens_come_with_the_probability_that_a_slow_implementation_gives(params: SamplingParams) -> None:
    logits, draws = logits_of(1, spread=2.0)[0], 4000
    expected = slow_distribution(logits, params)
    sampler, seen = Sampler(), Counter[int]()
    for first in range(0, draws, 50):
        batch = [Sequence(replace(params, seed=first + i)) for i in range(50)]
        seen.update(sampler.sample(logits.repeat(50, 1), batch).tokens)
    assert all(expected[token] > 0 for token in seen)
    order = np.argsort(-expected)[: int((expected > 0).sum())]
    bins = np.floor((expected[order].cumsum() - expected[order] / 2) * 20).astype(int)  # of about equal mass, best first
    bins = np.unique(bins, return_inverse=True)[1]
    mass = np.bincount(bins, weights=expected[order])
    got = np.bincount(bins, weights=[seen[int(token)] for token in order])
    chi_square = ((got - draws * mass) ** 2 / (draws * mass)).sum()
    assert chi_square < 50  # at most 19 degrees of freedom: above 50 once in 10,000 times; the seeds are fixed


@pytest.mark.parametrize("vocab", [VOCAB, 5 * MORE_CANDIDATES])
@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
def test_the_number_is_looked_up_in_the_mass_of_the_kept_tokens_best_first(params: SamplingParams, vocab: int) -> None:
    logits = logits_of(1, spread=2.0, seed=3, vocab=vocab)[0]
    expected = slow_distribution(logits, params)
    order = np.argsort(-logits.double().numpy(), kind="stable")
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        order[CANDIDATES:].sort()
    for seed in range(100):
        sequence = Sequence(replace(params, seed=seed))
        token = sample_one(logits, sequence)
        before = expected[order].cumsum()[int(np.flatnonzero(order == token)[0])] - expected[token]
        number = uniform(seed, len(sequence.tokens))
        assert before - 5e-5 <= number <= before + expected[token] + 5e-5  # float32 sums over the whole vocabulary


def mixed_batch() -> list[Sequence]:
    kinds = [
        replace(HOT, temperature=0.0),
        HOT,
        replace(HOT, top_p=0.9, logprobs=3),
        replace(HOT, temperature=2.0, top_p=0.99),
        replace(HOT, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=0),
        replace(HOT, temperature=0.0, presence_penalty=1.0, min_tokens=9, logprobs=20),
        replace(HOT, top_k=5, min_p=0.2, seed=9),
    ]
    return [Sequence(params, request_id=str(i), tokens=[3, 5, 3, 8 + i]) for i, params in enumerate(kinds)]


@pytest.mark.parametrize("vocab", [VOCAB, 49152])
def test_a_row_gets_the_same_token_and_logprobs_whatever_else_is_in_the_batch(vocab: int) -> None:
    batch, logits = mixed_batch(), logits_of(7, vocab=vocab)
    together = Sampler().sample(logits.clone(), batch)
    for order in ([6, 5, 4, 3, 2, 1, 0], [2, 4], *([row] for row in range(7))):
        output = Sampler().sample(logits[order].clone(), [batch[row] for row in order])
        assert output.tokens == [together.tokens[row] for row in order]
        if output.logprobs:
            assert output.logprobs == [together.logprobs[row] for row in order]


def test_greedy_takes_the_first_best_token() -> None:
    logits = logits_of(3)
    logits[1, [50, 60]] = 100.0
    batch = [Sequence(replace(HOT, temperature=0.0)) for _ in range(3)]
    assert Sampler().sample(logits.clone(), batch).tokens == logits.argmax(-1).tolist()
    assert int(logits[1].argmax()) == 50


def test_a_seed_and_a_position_fix_the_token() -> None:
    logits = logits_of(1)[0]
    drawn = [sample_one(logits, Sequence(HOT, tokens=[1] * n)) for n in range(1, 30)]
    assert drawn == [sample_one(logits, Sequence(HOT, tokens=[2] * n)) for n in range(1, 30)]
    assert len(set(drawn)) > 5
    assert drawn != [sample_one(logits, Sequence(replace(HOT, seed=2), tokens=[1] * n)) for n in range(1, 30)]


def test_uniform_numbers_are_spread_evenly_over_seeds_and_positions() -> None:
    for numbers in ([uniform(seed, 10) for seed in range(5000)], [uniform(3, position) for position in range(5000)]):
        assert all(0 <= number < 1 for number in numbers)
        counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
        assert ((counts - 100) ** 2 / 100).sum() < 100  # 49 degrees of freedom
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
    assert uniform(12345, 678) == 0.4602253188658353  # the function is part of what a replay relies on


def slow_penalties(logits: Tensor, sequence: Sequence) -> Tensor:
    params, out = sequence.params, logits.clone()
    generated = Counter(sequence.tokens[sequence.prompt_tokens :])
    for token in set(sequence.tokens):
        value = out[token]
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        out[token] = value - params.presence_penalty * (generated[token] > 0) - params.frequency_penalty * generated[token]
    return out


def test_penalties_follow_the_tokens_as_they_grow_and_start_over_after_a_new_start() -> None:
    params = replace(HOT, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=-0.3)
    rng, penalties = np.random.default_rng(0), Penalties()
    sequence = Sequence(params, tokens=rng.integers(0, 300, 90).tolist(), prompt_tokens=90)
    for step in range(150):
        logits = logits_of(1, seed=step)[0]
        expected = slow_penalties(logits, sequence)
        penalties.apply([(logits, sequence)])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-6)
        if step == 100:  # another request under the same name, after the first has ended
            sequence = Sequence(params, tokens=[4, 5, 6], prompt_tokens=3)
        sequence.tokens = [*sequence.tokens, *rng.integers(0, 300, 1 + step % 3).tolist()]


def test_counts_of_requests_that_are_gone_are_dropped() -> None:
    penalties, params = Penalties(), replace(HOT, repetition_penalty=1.1)
    logits = logits_of(1)[0]
    for number in range(1000):
        penalties.apply([(logits.clone(), Sequence(params, request_id=str(number)))])
    assert len(penalties._counts) < 300


def test_stop_tokens_cannot_come_before_min_tokens() -> None:
    logits = torch.zeros(VOCAB)
    logits[[EOS, 11]] = 50.0
    logits[20] = 10.0
    params = replace(HOT, temperature=0.0, min_tokens=3, stop_token_ids=(11, VOCAB + 5))
    short, enough = Sequence(params, tokens=[1, 2, 3, 4]), Sequence(params, tokens=[1, 2, 3, 4, 5])
    assert sample_one(logits, short) == 20
    assert sample_one(logits, enough) == EOS
    ignores = Sequence(replace(params, ignore_eos=True), tokens=[1, 2, 3])
    assert sample_one(logits, ignores) == EOS


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = logits_of(1)
    params = replace(HOT, temperature=0.3, top_k=4, repetition_penalty=2.0, min_tokens=50, logprobs=5)
    output = Sampler().sample(logits.clone(), [Sequence(params)])
    raw = torch.log_softmax(logits[0], dim=-1)
    (logprobs,) = output.logprobs
    assert logprobs is not None
    assert logprobs.logprob == pytest.approx(float(raw[output.tokens[0]]))
    best = raw.topk(5)
    assert [token for token, _ in logprobs.top] == best.indices.tolist()
    assert [value for _, value in logprobs.top] == pytest.approx(best.values.tolist())


def test_no_logprobs_are_made_when_nobody_asks() -> None:
    assert Sampler().sample(logits_of(2), [Sequence(HOT), Sequence(HOT)]).logprobs == []
