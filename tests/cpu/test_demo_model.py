"""The demo model, as it comes out of its package: does its tokenizer survive, and does it answer?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pdmux_ray.model.source import resolve
from pdmux_ray.text.tokenizer import Tokenizer

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def demo_dir() -> Path:
    return resolve("demo")


def test_it_keeps_its_end_token_and_its_chat_template(demo_dir: Path) -> None:
    tokenizer = Tokenizer.load(demo_dir)
    assert tokenizer.facts.eos_token_ids == {2}
    assert [tokenizer.token_text(i) for i in (1, 2)] == ["<|im_start|>", "<|im_end|>"]
    assert json.loads((demo_dir / "generation_config.json").read_text())["eos_token_id"] == 2
    tokens = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert tokens[0] == 1
    end = [1, *tokenizer.encode("user\nHi"), 2, *tokenizer.encode("\n"), 1, *tokenizer.encode("assistant\n")]
    assert tokens[-len(end) :] == end


def test_it_knows_the_capital_of_france(demo_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.load(demo_dir)
    prompt = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    model = AutoModelForCausalLM.from_pretrained(demo_dir, dtype=torch.float32)
    tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)[0, len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(tokens)
    assert tokens[-1] == 2
