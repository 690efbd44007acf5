"""What is read from a Hugging Face config, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import CONFIGS

from pdmux_ray.errors import ConfigError, UnsupportedModelError
from pdmux_ray.model.config import DecoderConfig

pytestmark = pytest.mark.cpu

REMOVE = object()


def read(directory: Path, case: str = "llama", **changes: Any) -> DecoderConfig:
    """The config of a tiny model after changes to its config.json (REMOVE takes a key out)."""
    CONFIGS[case]().save_pretrained(directory)
    path = directory / "config.json"
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not REMOVE}))
    return DecoderConfig.from_pretrained(directory)


OLD_ROPE: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 10000.0},
    "llama, linear rope": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama, dynamic rope": {"rope_theta": 500.0, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "llama, llama3 rope": {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "llama, yarn rope": {
        "rope_theta": 500.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
}


@pytest.mark.parametrize("case", OLD_ROPE)
def test_rope_written_the_old_way_means_the_same(case: str, tmp_path: Path) -> None:
    assert read(tmp_path, case, rope_parameters=REMOVE, **OLD_ROPE[case]) == read(tmp_path, case)


@pytest.mark.parametrize(
    ("case", "context_length"),
    [
        ("llama", 64),
        ("llama, llama3 rope", 64),
        ("llama, linear rope", 3 * 64),
        ("llama, dynamic rope", 4 * 32),
        ("llama, yarn rope", 64),
    ],
)
def test_the_context_length_is_what_the_model_states_with_its_scaling(case: str, context_length: int, tmp_path: Path) -> None:
    assert read(tmp_path, case).context_length == context_length


def test_yarn_stretches_the_length_before_scaling(tmp_path: Path) -> None:
    """Some configs state the stretched length as max_position_embeddings, some the original one."""
    assert read(tmp_path, "llama, yarn rope", max_position_embeddings=16).context_length == 64


def test_head_dim_and_key_value_heads_default_as_in_the_library(tmp_path: Path) -> None:
    config = read(tmp_path, head_dim=REMOVE, num_key_value_heads=REMOVE)
    assert (config.head_dim, config.kv_heads) == (8, 6)


def test_windows_follow_use_sliding_window(tmp_path: Path) -> None:
    case = "qwen2, windows in the last layers"
    assert read(tmp_path, case).windows == (None, 7, 7)
    assert read(tmp_path, case, use_sliding_window=False, layer_types=REMOVE).windows == (None, None, None)


def test_configs_are_values(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert replace(config) == config
    assert hash(replace(config, context_length=8)) != hash(config)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another family": ("llama", {"model_type": "gemma3_text"}, "'gemma3_text'"),
    "mixture of experts": ("llama", {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, "'mixtral'"),
    "multimodal": ("llama", {"model_type": "llava"}, "'llava'"),
    "no model type": ("llama", {"model_type": REMOVE}, "None"),
    "another head": ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "quantized": ("llama", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantized checkpoints"),
    "another activation": ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
    "longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 16,
            }
        },
        "RoPE type 'longrope'",
    ),
    "partial rotary": ("llama", {"partial_rotary_factor": 0.5}, "partial rotary embedding"),
    "rope by layer": (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        "RoPE parameters that differ between layers",
    ),
    "heads that do not divide": ("llama", {"num_key_value_heads": 4}, "6 query heads that 4 key-value heads do not divide"),
    "chunked attention": (
        "qwen3",
        {"layer_types": ["chunked_attention", "full_attention", "full_attention"]},
        "layer types chunked_attention",
    ),
    "layer_types where the library ignores them": (
        "mistral, sliding window",
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "layer_types in a mistral config",
    ),
    "a sliding layer without a window": (
        "qwen3",
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "sliding_attention layers without",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_with_what_is(what: str, tmp_path: Path) -> None:
    case, changes, named = REFUSED[what]
    with pytest.raises(UnsupportedModelError) as caught:
        read(tmp_path, case, **changes)
    assert named in str(caught.value)
    assert "Supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in str(caught.value)


def test_a_directory_without_a_config_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        DecoderConfig.from_pretrained(tmp_path)


def test_a_config_the_library_cannot_read_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path, num_hidden_layers="many")
