"""A block of layers as one native call gives the bits of its operations one by one."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_runner import Sequence, prompt, whole
from tiny_models import CONFIGS, save_tiny

from kv_transfer.layout import KVLayout
from pdmux_ray.device.cpu.ops import CpuOps
from pdmux_ray.device.cpu.whole_layers import WholeLayers
from pdmux_ray.device.step_tensors import StepTensors
from pdmux_ray.engine.runner import PrefillSlice, StepBatch
from pdmux_ray.model.config import DecoderConfig
from pdmux_ray.model.decoder import load_decoder
from pdmux_ray.model.ops import AttentionSpec, LayerWeights

pytestmark = pytest.mark.cpu

PAGE, PAGES = 16, 64
HEADS_TAKEN = [name for name in CONFIGS if "hidden / heads" not in name and "window of two" not in name]


class OneByOne(CpuOps):
    """Offers no way through whole layers."""

    def whole_layers(self, weights: Many[LayerWeights], specs: Many[AttentionSpec], norm_eps: float) -> None:
        return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HEADS_TAKEN)
def test_every_option_of_a_model_is_covered_and_agrees_to_the_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A prompt longer than a block of rows, beside a chunk and a decode."""
    config = replace(DecoderConfig.from_pretrained(save_tiny(name, tmp_path)), context_length=1024)
    layout = KVLayout(config.layers, PAGES, config.kv_heads, PAGE, config.head_dim, dtype.itemsize)
    pools = [torch.zeros(layout.shape, dtype=dtype) for _ in range(2)]
    fast = load_decoder(tmp_path, dtype, CpuOps(pools[0]), config=config)
    if not CpuOps(pools[0])._kernels.linear_is_fast:
        pytest.skip("the linears of this processor are torch's")
    assert isinstance(fast._whole_layers, WholeLayers)
    long, other = Sequence(prompt(0, 700), list(range(50))), Sequence(prompt(1, 40), [60, 61, 62])
    batch = StepBatch([other], [whole(long), PrefillSlice(other, 3, 20, sample=False)])
    step = StepTensors(batch, PAGE, config.rope.dynamic)
    results = []
    with torch.inference_mode():
        for decoder in (fast, fast.with_ops(OneByOne(pools[1]))):
            hidden = decoder.run_layers(0, 2, decoder.embed(step.token_ids), step.batch)
            results.append(decoder.run_layers(2, config.layers, hidden, step.batch))
    assert torch.equal(*results)
    assert torch.equal(*pools)
