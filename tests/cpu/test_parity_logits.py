"""Logits against transformers in float32, for every family and option, by every way a forward pass can be cut up."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from paged_forward import load_paged, run_sequences
from tiny_models import CONFIGS, VOCAB, load_reference, reference_logits, save_tiny
from torch import Tensor

from pdmux_ray.device.cpu.ops import make_ops
from pdmux_ray.model.config import DecoderConfig
from pdmux_ray.model.decoder import Decoder
from pdmux_ray.model.reference_ops import ReferenceOps

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:slow attention")]

OPS = {"reference ops": ReferenceOps, "cpu ops": make_ops}
TOLERANCE = 1e-3
SEQUENCES = [random.Random(length).choices(range(VOCAB), k=length) for length in (45, 1, 17, 38)]

PATHS: dict[str, dict[str, int | None]] = {
    "whole": {},
    "a token at a time": {"chunk": 1},
    "in chunks of 3, a layer at a time": {"chunk": 3, "layer_block": 1},
    "in chunks of 16": {"chunk": 16},
    "whole, two layers at a time": {"layer_block": 2},
}


@dataclass(frozen=True)
class Case:
    model_dir: Path
    decoders: dict[str, Decoder]  # by name of OPS
    expected: list[Tensor]


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(save_tiny(request.param, tmp_path_factory.mktemp("tiny")), SEQUENCES)


def make_case(model_dir: Path, sequences: list[list[int]]) -> Case:
    reference = load_reference(model_dir)
    decoders = {name: load_paged(model_dir, make_ops=make) for name, make in OPS.items()}
    return Case(model_dir, decoders, [reference_logits(reference, sequence) for sequence in sequences])


def worst(outputs: list[Tensor], expected: list[Tensor]) -> float:
    """Largest absolute difference; NaN counts as infinite. Prints it, for docs/performance.md."""
    differences = [(out - want).abs().max() for out, want in zip(outputs, expected, strict=True)]
    largest = max(float(torch.nan_to_num(difference, nan=float("inf"))) for difference in differences)
    print(f"\nlargest difference of logits: {largest:.1e}")
    return largest


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("path", PATHS)
def test_logits_are_those_of_transformers_when_batched(case: Case, path: str, ops: str) -> None:
    assert worst(run_sequences(case.decoders[ops], SEQUENCES, **PATHS[path]), case.expected) <= TOLERANCE


@pytest.mark.parametrize("ops", OPS)
def test_logits_are_those_of_transformers_when_alone(case: Case, ops: str) -> None:
    alone = [run_sequences(case.decoders[ops], [sequence])[0] for sequence in SEQUENCES]
    assert worst(alone, case.expected) <= TOLERANCE


@pytest.mark.parametrize("ops", OPS)
def test_logits_are_those_of_transformers_while_decoding(case: Case, ops: str) -> None:
    """Prompts of 30 tokens (dynamic RoPE begins to scale during the decode) and of 40 (it does in the prompt)."""
    reference = load_reference(case.model_dir)
    for prompt in (30, 40):
        expected = reference_logits(reference, SEQUENCES[0], prompt)
        assert worst(run_sequences(case.decoders[ops], SEQUENCES[:1], chunk=7, prompt_tokens=prompt), [expected]) <= TOLERANCE


@pytest.mark.parametrize("name", [name for name in CONFIGS if "rope" in name or ("window" in name and "no window" not in name)])
def test_scaling_and_windows_matter_at_these_lengths(name: str, tmp_path: Path) -> None:
    """Otherwise the tests above would pass without them."""
    model_dir = save_tiny(name, tmp_path)
    expected = [reference_logits(load_reference(model_dir), SEQUENCES[0])]
    plain = DecoderConfig.from_pretrained(save_tiny("llama", tmp_path / "plain")).rope
    decoder = load_paged(model_dir)
    without: dict[str, DecoderConfig] = {}
    if "rope" in name:
        without["rope"] = replace(decoder.config, rope=replace(plain, inv_freq=_unscaled(decoder.config)))
    if "window" in name:
        without["windows"] = replace(decoder.config, windows=(None,) * decoder.config.layers)
    for option, config in without.items():
        assert worst(run_sequences(load_paged(model_dir, config=config), SEQUENCES[:1]), expected) > 100 * TOLERANCE, option


def _unscaled(config: DecoderConfig) -> tuple[float, ...]:
    half = config.head_dim // 2
    return tuple(config.rope.theta ** (-i / half) for i in range(half))


DEMO_TEXTS = (
    "The capital of France is Paris. The capital of Germany is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\nprint([",
    "Once",
)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("path", PATHS)
def test_the_demo_model_has_the_logits_of_transformers(
    path: str, ops: str, demo: Case, demo_sequences: list[list[int]]
) -> None:
    assert worst(run_sequences(demo.decoders[ops], demo_sequences, **PATHS[path]), demo.expected) <= TOLERANCE


@pytest.fixture(scope="module")
def demo_sequences(demo_dir: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_dir)
    return [tokenizer(text)["input_ids"] for text in DEMO_TEXTS]


@pytest.fixture(scope="module")
def demo(demo_dir: Path, demo_sequences: list[list[int]]) -> Case:
    return make_case(demo_dir, demo_sequences)
