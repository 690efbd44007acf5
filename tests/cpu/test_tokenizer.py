"""With transformers, which loads torch where that is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from pdmux_ray.errors import ConfigError, RequestError
from pdmux_ray.text.tokenizer import Tokenizer
from tests.unit.text.small import EOS, SmallTokenizer, byte_fallback, byte_level

pytestmark = pytest.mark.cpu

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('tools are not for me') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CONFIG = {"model_type": "llama", "vocab_size": 400, "max_position_embeddings": 128, "eos_token_id": 7}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    write_model(tmp_path, byte_level())
    return tmp_path


def write_model(directory: Path, small: SmallTokenizer, template: str | None = TEMPLATE, **config: Any) -> None:
    hf = PreTrainedTokenizerFast(tokenizer_object=small.backend, eos_token=EOS)
    hf.chat_template = template
    hf.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_text_survives_the_round_trip(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    assert tokenizer.decode(tokenizer.encode("stop the caf\u00e9 \U0001f600")) == "stop the caf\u00e9 \U0001f600"
    assert (tokenizer.facts.vocab_size, tokenizer.facts.context_length) == (400, 128)


def test_every_file_that_names_an_end_token_is_heard(model_dir: Path) -> None:
    eos = Tokenizer.load(model_dir).backend.token_to_id(EOS)
    assert Tokenizer.load(model_dir).facts.eos_token_ids == {7, eos}
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert Tokenizer.load(model_dir).facts.eos_token_ids == {7, 8, 9, eos}


def test_a_context_stretched_by_rope_scaling_counts_as_the_models(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    write_model(tmp_path, byte_level(), rope_scaling=yarn)
    assert Tokenizer.load(tmp_path).facts.context_length == 512


def test_a_chat_follows_the_models_template(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    eos = tokenizer.backend.token_to_id(EOS)
    assert tokenizer.chat(user("hop")) == [*tokenizer.encode("[user]hop"), eos, *tokenizer.encode("[assistant]")]
    assert tokenizer.chat(user("hop"), add_generation_prompt=False)[-1] == eos


def test_a_final_message_can_be_left_open(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    messages = [*user("hop"), {"role": "assistant", "content": "I ho"}]
    tokens = tokenizer.chat(messages, add_generation_prompt=False, continue_final=True)
    assert tokenizer.decode(tokens).endswith("[assistant]I ho")
    assert tokens[-1] != tokenizer.backend.token_to_id(EOS)


def test_what_the_template_refuses_is_told_in_its_own_words(model_dir: Path) -> None:
    with pytest.raises(RequestError, match="tools are not for me") as caught:
        Tokenizer.load(model_dir).chat([{"role": "tool", "content": "x"}])
    assert caught.value.param == "messages"


def test_a_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    write_model(tmp_path, byte_level(), template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError, match="unsafe"):
        Tokenizer.load(tmp_path).chat(user("x"))


def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    write_model(tmp_path, byte_level(), template=None)
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.load(tmp_path).chat(user("x"))


@pytest.mark.parametrize("param", ["prompt", "messages"])
def test_text_that_is_no_unicode_is_a_request_error_in_our_words(model_dir: Path, param: str) -> None:
    tokenizer = Tokenizer.load(model_dir)
    with pytest.raises(RequestError, match=r"not valid Unicode: half of a surrogate pair .* stands alone in it\.$") as caught:
        tokenizer.encode("\ud800") if param == "prompt" else tokenizer.chat(user("\ud800"))
    assert caught.value.param == param


@pytest.mark.parametrize("small", [byte_level(), byte_fallback()], ids=["byte_level", "byte_fallback"])
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(small: SmallTokenizer, tmp_path: Path) -> None:
    write_model(tmp_path, small)
    tokenizer = Tokenizer.load(tmp_path)
    text = "stop\n\u00e9 \u20ac\U0001f600"
    tokens = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode().removeprefix(" ") == text
    assert "\ufffd" in map(tokenizer.token_text, tokens)  # a byte of the emoji, by itself
    assert tokenizer.token_text(tokenizer.backend.token_to_id(EOS)) == EOS
    assert tokenizer.token_bytes(399) == b""


def test_a_directory_without_a_config_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        Tokenizer.load(tmp_path)


def test_a_directory_without_a_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigError, match="tokenizer"):
        Tokenizer.load(tmp_path)
