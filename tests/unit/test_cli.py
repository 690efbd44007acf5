from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
import yaml

from pdmux_ray import __version__, cli
from pdmux_ray.device.gpus import has_gpu
from pdmux_ray.types import SamplingParams

ROOT = Path(__file__).parents[2]


def config_of(folder: Path, args: str) -> Path:
    """A config file whose application's `args` are `args`."""
    path = folder / "serve.yaml"
    path.write_text(f"applications: [{{import_path: pdmux_ray.serve.app:build_app, args: {args}}}]")
    return path


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"pdmux-ray {__version__}\n"


def test_a_valid_config_is_shown_with_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check", str(ROOT / "configs" / "cpu-demo.yaml")]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["model"] == "demo"
    assert shown["engine"]["page_size"] == 16


def test_what_is_left_to_the_machine_is_shown_as_what_it_becomes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "small"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).touch()
    assert cli.main(["config", "check", str(config_of(tmp_path, f"{{model: {model}}}"))]) == 0
    shown = capsys.readouterr().out
    assert "hub id" not in shown
    device = "cuda" if has_gpu() else "cpu"
    for line in ("# served_model_name: small\n", f"# engine.device: {device}\n", "# engine.kv_cache_gib: "):
        assert line in shown


def test_of_a_config_for_a_gpu_no_threads_are_told_and_a_share_of_its_memory_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check", str(ROOT / "configs" / "1gpu-mux.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "# engine.kv_cache_gib: 90% of what is left of the GPU's memory\n" in shown
    assert "# engine.threads" not in shown


def test_a_wrong_config_is_an_error_that_names_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check", str(config_of(tmp_path, "{engine: {page_sise: 16}}"))]) == 2
    assert "engine.page_sise" in capsys.readouterr().err


def test_a_wrong_table_makes_a_config_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path, "{engine: {multiplex: {policy: sglang, table: t.yaml}}}")
    (tmp_path / "t.yaml").write_text("sm_group_num: 8\n")
    assert cli.main(["config", "check", str(config)]) == 0
    (tmp_path / "t.yaml").write_text("sm_group_num: 2\n")
    assert cli.main(["config", "check", str(config)]) == 2
    assert "t.yaml, line 1: sm_group_num is a whole number, 3 or more" in capsys.readouterr().err


def test_a_model_that_cannot_be_there_makes_a_config_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for model, message in (("dmeo", "neither 'demo', nor a directory"), (tmp_path / "empty", "lacks config.json")):
        assert cli.main(["config", "check", str(config_of(tmp_path, f"{{model: {model}}}"))]) == 2
        shown = capsys.readouterr()
        assert (shown.out, message in shown.err) == ("", True)


def test_a_hub_id_is_said_to_be_one_and_not_looked_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check", str(config_of(tmp_path, "{model: owner/name}"))]) == 0
    assert "# model: a hub id, not looked up\n" in capsys.readouterr().out


def test_every_sampling_parameter_has_a_flag_and_every_flag_a_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    section = capsys.readouterr().out.partition("\nsampling:\n")[2]
    flags = {word for line in section.splitlines() for word in line.split()[:1] if word.startswith("--")}
    fields = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(SamplingParams)}
    assert {"--stop-token-ids" if flag == "--stop-token-id" else flag for flag in flags} == fields | {"--stop"}


def test_flags_reach_the_sampling_parameters() -> None:
    given = ["--max-tokens", "9", "--top-k", "3", "--seed", "4", "--stop-token-id", "1", "--stop-token-id", "2", "--ignore-eos"]
    params = cli.sampling_params(cli.parser().parse_args(["generate", *given]))
    assert params == SamplingParams(max_tokens=9, top_k=3, seed=4, stop_token_ids=(1, 2), ignore_eos=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "neither 'demo', nor a directory"),
        (["--temperature", "9"], "temperature must be between"),
        (["--min-tokens", "9", "--max-tokens", "3"], "min_tokens (9) must not exceed max_tokens (3)"),
        (["--logprobs", "1"], "--logprobs needs --json"),
        (["--config", "missing.yaml"], "cannot read missing.yaml"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--prompt", "x", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("pdmux: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


def test_ctrl_c_amid_the_reading_of_the_arguments_ends_the_command_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> argparse.ArgumentParser:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "parser", interrupted)
    assert cli.main(["version"]) == 130
    assert capsys.readouterr() == ("", "")
