"""Loading: nothing is left out silently, sharding changes nothing, and the peak of memory stays near the weights' size."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_forward import load_paged, run_sequences
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from torch import Tensor
from transformers import LlamaConfig

from pdmux_ray.errors import WeightsError
from pdmux_ray.model.config import DecoderConfig
from pdmux_ray.model.reference_ops import ReferenceOps
from pdmux_ray.model.weights import Checkpoint, DummySource, expected_shapes, load_weights

pytestmark = pytest.mark.cpu

TOKENS = [list(range(20))]
Q0, GATE1 = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "model", max_shard_size="1GB")


@pytest.fixture
def tied_dir(tmp_path: Path) -> Path:
    return save_tiny("llama, tied", tmp_path / "tied", max_shard_size="1GB")


def edit(model_dir: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)


def logits(model_dir: Path) -> Tensor:
    return run_sequences(load_paged(model_dir), TOKENS)[0]


def test_a_sharded_checkpoint_loads_like_a_single_file(tmp_path: Path, model_dir: Path) -> None:
    sharded = save_tiny("llama", tmp_path / "sharded")
    assert len(list(sharded.glob("*.safetensors"))) > 5
    assert torch.equal(logits(sharded), logits(model_dir))


def test_a_big_tensor_is_read_in_blocks(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = logits(model_dir)
    monkeypatch.setattr("pdmux_ray.model.weights.BLOCK_ELEMENTS", 100)
    assert torch.equal(logits(model_dir), whole)


def test_weights_are_cast_to_the_asked_dtype_and_fused_in_order(model_dir: Path) -> None:
    config, ops = DecoderConfig.from_pretrained(model_dir), ReferenceOps(torch.zeros(1, 2, 1, 1, 1, 1))
    layer = load_weights(config, Checkpoint(model_dir, config), torch.bfloat16, ops).layers[0]
    stored = load_file(model_dir / "model.safetensors")
    qkv = torch.cat([stored[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    gate_up = torch.cat([stored[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(layer.qkv[0], qkv.bfloat16())
    assert torch.equal(layer.gate_up[0], gate_up.bfloat16())


def test_every_misfit_is_named_in_one_error(model_dir: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors[Q0]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
        tensors[GATE1] = torch.zeros(3, 48)
        tensors["model.norm.weight"] = torch.zeros(48, dtype=torch.int8)

    edit(model_dir, spoil)
    with pytest.raises(WeightsError) as caught:
        logits(model_dir)
    message = str(caught.value)
    assert f"missing: {Q0}" in message
    assert "unexpected: model.layers.7.mlp.up_proj.weight" in message
    assert f"wrong shape: {GATE1} is [3, 48], the config calls for [56, 48]" in message
    assert "wrong type: model.norm.weight is I8" in message


def test_a_bias_the_config_does_not_call_for_is_an_error(model_dir: Path) -> None:
    edit(model_dir, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    with pytest.raises(WeightsError, match=r"unexpected: model\.layers\.0\.self_attn\.q_proj\.bias"):
        logits(model_dir)


def test_rotary_frequencies_of_old_checkpoints_are_harmless(model_dir: Path) -> None:
    before = logits(model_dir)
    edit(model_dir, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert torch.equal(logits(model_dir), before)


def test_a_tied_head_may_be_stored_when_it_equals_the_embedding(tied_dir: Path) -> None:
    before = logits(tied_dir)
    edit(tied_dir, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    assert torch.equal(logits(tied_dir), before)


def test_a_tied_head_that_differs_from_the_embedding_is_an_error(tied_dir: Path) -> None:
    edit(tied_dir, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        logits(tied_dir)


def test_an_untied_model_without_a_head_is_an_error(model_dir: Path) -> None:
    edit(model_dir, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WeightsError, match=r"missing: lm_head\.weight"):
        logits(model_dir)


def test_a_directory_without_safetensors_is_an_error(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="holds neither"):
        logits(model_dir)


def test_a_truncated_file_is_an_error(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="cannot read"):
        logits(model_dir)


def test_an_index_that_names_an_absent_shard_is_an_error(tmp_path: Path) -> None:
    sharded = save_tiny("llama", tmp_path / "sharded")
    gone = min(sharded.glob("*.safetensors"))
    gone.unlink()
    with pytest.raises(WeightsError, match=gone.name):
        logits(sharded)


def test_a_weight_in_two_shards_is_an_error(tmp_path: Path) -> None:
    sharded = save_tiny("llama", tmp_path / "sharded")
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second)
    with pytest.raises(WeightsError, match=f"is both in {first.name} and in {second.name}"):
        logits(sharded)


def test_dummy_weights_need_no_checkpoint_and_are_the_same_each_time(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    first, second = (run_sequences(load_paged(model_dir, load="dummy"), TOKENS)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert first.std() > 0


def test_dummy_weights_do_not_repeat() -> None:
    source, (first, second) = DummySource(), torch.empty(2, 8)
    source.fill("a", first)
    source.fill("b", second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dummy_matrix_keeps_the_size_of_what_it_is_multiplied_with(dtype: torch.dtype) -> None:
    source, matrix, norm = DummySource(), torch.empty(256, 1024, dtype=dtype), torch.empty(4096, dtype=dtype)
    source.fill("model.layers.0.mlp.down_proj.weight", matrix)
    source.fill("model.norm.weight", norm)
    assert (matrix.float() @ torch.ones(1024)).std() == pytest.approx(1.0, rel=0.2)
    assert norm.float().mean() == pytest.approx(1.0, abs=0.01)


PEAK_SCRIPT = """
import re, sys, torch
from pathlib import Path
from pdmux_ray.device.cpu.ops import make_ops
from pdmux_ray.model.config import DecoderConfig
from pdmux_ray.model.reference_ops import ReferenceOps
from pdmux_ray.model.weights import Checkpoint, load_weights

def status_kib(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

warm, model_dir, dtype = Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, sys.argv[3])
ops = {"reference": ReferenceOps, "cpu": make_ops}[sys.argv[4]](torch.zeros(1, 2, 1, 1, 16, 16, dtype=dtype))
for directory in (warm, model_dir):  # the first pays for imports and allocators
    config = DecoderConfig.from_pretrained(directory)
    before = status_kib("VmRSS")
    weights = load_weights(config, Checkpoint(directory, config), dtype, ops)
print(1024 * (status_kib("VmHWM") - before))
"""


@pytest.fixture(scope="module")
def big_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint of some 300 MB in two shards; half of it is embedding and head, the hardest to stream."""
    directory = tmp_path_factory.mktemp("big")
    LlamaConfig(
        vocab_size=16000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=3, num_attention_heads=16,
        num_key_value_heads=8, max_position_embeddings=64, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)  # fmt: skip
    shapes = expected_shapes(DecoderConfig.from_pretrained(directory))
    names, index = sorted(shapes), {}
    for shard, part in enumerate((names[::2], names[1::2])):
        save_file({name: torch.full(shapes[name], 0.5) for name in part}, directory / f"model-{shard}.safetensors")
        index |= {name: f"model-{shard}.safetensors" for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory


def peak_over_weights(warm_dir: Path, model_dir: Path, dtype: torch.dtype, ops: str) -> float:
    """What loading adds to a process's resident memory at its peak, over the size of the weights."""
    shapes = expected_shapes(DecoderConfig.from_pretrained(model_dir)).values()
    weights_bytes = dtype.itemsize * sum(torch.Size(shape).numel() for shape in shapes)
    command = [sys.executable, "-c", PEAK_SCRIPT, warm_dir, model_dir, str(dtype).removeprefix("torch."), ops]
    peak_bytes = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    print(f"\npeak while loading: {peak_bytes / 2**20:.0f} MiB for {weights_bytes / 2**20:.0f} MiB of weights")
    assert peak_bytes >= weights_bytes
    return peak_bytes / weights_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("dtype", "ops"), [(torch.float32, "reference"), (torch.bfloat16, "cpu")])
def test_loading_peaks_at_no_more_than_1_3_times_the_weights(
    dtype: torch.dtype, ops: str, big_dir: Path, model_dir: Path
) -> None:
    assert peak_over_weights(model_dir, big_dir, dtype, ops) <= 1.3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_the_demo_model_peaks_at_no_more_than_1_3_times_its_weights(demo_dir: Path, model_dir: Path) -> None:
    """Its head is tied, so that the embedding is there twice: plain, and packed as the head."""
    assert peak_over_weights(model_dir, demo_dir, torch.float32, "cpu") <= 1.3
