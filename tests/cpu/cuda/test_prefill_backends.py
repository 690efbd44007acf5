"""The attention of prefills by other libraries: what they are given, and who is told when they are not there."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from attention_cases import Case, Shape
from libraries import FlashInfer, OldWrapper, Varlen, Wrapper
from recorded import recorded_runner, settings
from test_runner import Sequence, prompt, whole
from tiny_models import save_tiny
from torch.nn.attention import varlen

from pdmux_ray.config import CudaConfig
from pdmux_ray.device.cuda.ops import CudaOps
from pdmux_ray.device.cuda.prefill_backends import (
    NAMES,
    FlashInferPrefill,
    MakeAttention,
    Needs,
    PagedPrefill,
    VarlenPrefill,
    attention_by,
)
from pdmux_ray.device.cuda.recording import RecordingStreams
from pdmux_ray.device.cuda.runner import CudaRunner
from pdmux_ray.device.cuda.scratch import Scratch
from pdmux_ray.device.cuda.startup import triton_kernels
from pdmux_ray.errors import ConfigError, IntegrityError
from pdmux_ray.types import Split

pytestmark = pytest.mark.cpu

SHAPES = {
    "prefill": Shape(4, 2, 16, (50,), (50,)),
    "after cached prefixes": Shape(6, 2, 16, (20, 3, 9), (75, 20, 9)),
    "window": Shape(4, 4, 16, (20, 3), (75, 20), window=11),
    "beside decodes": Shape(4, 2, 16, (1, 1, 20, 5), (70, 3, 20, 33)),
}
DECODES = {"beside decodes": 2}
NEEDS = Needs(torch.device("cpu"), torch.bfloat16, page_size=256, head_dim=128, plans=2)


def known(name: str) -> Case:
    """With what the host knows of it."""
    case = SHAPES[name].case(torch.float32)
    case.batch = replace(case.batch, decodes=DECODES.get(name, 0))
    case.batch = replace(case.batch, host=case.batch)
    return case


def by(attention: object) -> MakeAttention:
    return lambda sms, max_sequences: attention  # type: ignore[return-value]


def ops(attention: object) -> Callable[[torch.Tensor], CudaOps]:
    return lambda pool: CudaOps(pool, Scratch("cpu", pool.dtype, 128), 20, by(attention))


def unwatched() -> Callable[[], None]:
    return lambda: None


def wrapper() -> PagedPrefill:
    return Wrapper(torch.empty(0), "HND", backend="fa2")  # type: ignore[return-value]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("library", ["varlen", "flashinfer"])
def test_a_library_that_does_what_it_documents_gives_the_attention_of_the_reference(library: str, name: str) -> None:
    attention = VarlenPrefill(Varlen()) if library == "varlen" else FlashInferPrefill(wrapper, 1, unwatched)
    case = known(name)
    expected, expected_pool = case.reference()
    out, pool = case.run(ops(attention))
    torch.testing.assert_close(out, expected, atol=5e-6, rtol=0)
    torch.testing.assert_close(pool, expected_pool, atol=5e-6, rtol=0, equal_nan=True)


def test_torch_is_told_the_longest_of_the_prefills_and_not_of_the_decodes_beside_them() -> None:
    library = Varlen()
    known("beside decodes").run(ops(VarlenPrefill(library)))
    known("window").run(ops(VarlenPrefill(library)))
    assert library.calls == [
        {"max_q": 20, "max_k": 33, "window": (-1, 0), "queries": [20, 5]},
        {"max_q": 20, "max_k": 75, "window": (10, 0), "queries": [20, 3]},
    ]


def test_the_installed_torch_takes_what_it_is_given() -> None:
    """On tensors without memory, by the shapes and types that its operation declares; only a GPU computes it."""
    case = SHAPES["after cached prefixes"].case(torch.bfloat16)
    names = ("query_starts", "context_lengths", "page_table")
    on_device = {name: getattr(case.batch, name).to("meta") for name in names}
    query, out = case.qkv.to("meta"), torch.empty(len(case.qkv), 96, dtype=torch.bfloat16, device="meta")
    attention = attention_by("varlen", replace(NEEDS, head_dim=16))(20, 8)
    keys, values = case.pool[0].to("meta")
    attention(query, keys, values, replace(case.batch, host=case.batch, **on_device), case.spec, out)


def test_the_double_has_torchs_own_arguments() -> None:
    double = inspect.signature(Varlen.__call__).parameters
    real = inspect.signature(varlen.varlen_attn_out).parameters
    assert [name for name in double if name != "self"] == [name for name in real if name != "return_aux"]
    assert {name: double[name].kind for name in real if name != "return_aux"} == {
        name: part.kind for name, part in real.items() if name != "return_aux"
    }


def test_what_the_host_knows_is_asked_for(tmp_path: Path) -> None:
    case = SHAPES["prefill"].case(torch.float32)
    with pytest.raises(IntegrityError, match="what the host knows"):
        case.run(ops(VarlenPrefill(Varlen())))


def test_every_pass_of_a_job_is_planned_once_for_all_its_layers(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    Wrapper.made.clear()
    attention = FlashInferPrefill(wrapper, 3, unwatched)
    few = {"max_batch": 1, "cuda": {"decode_buckets": [1]}}
    runner, _ = recorded_runner(tmp_path, kernels=triton_kernels(by(attention)), splits=[Split(5, 3)], **few)
    before = sum(len(made.plans) for made in Wrapper.made)
    runner.open_job(1, [whole(Sequence(prompt(1, 40), list(range(12))))])
    assert runner.layers > 1
    runner.launch_block(1, 1, Split(5, 3))
    runner.collect_block()
    runner.launch_block(1, runner.layers, Split(5, 3))
    assert runner.collect_block() is not None
    assert sum(len(made.plans) for made in Wrapper.made) - before == 3
    runner.close()


def test_a_plan_is_written_anew_only_when_it_has_been_copied() -> None:
    """The one that was used longest ago, so that as a rule nobody waits."""
    log: list[str] = []

    def mark() -> Callable[[], None]:
        number = len(log)
        log.append("planned")
        return lambda: log.append(f"waited for {number}")

    attention = FlashInferPrefill(wrapper, 0, mark)  # and two spare ones
    cases = [known("prefill") for _ in range(3)]
    for case in (cases[0], cases[1], cases[0], cases[2]):
        case.run(ops(attention))
    assert log == ["planned", "planned", "waited for 1", "planned"]


def test_the_installed_flashinfer_is_made_to_take_our_pools_and_no_part_of_the_devices_sms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", FlashInfer(Wrapper))  # type: ignore[arg-type]
    Wrapper.made.clear()
    made = attention_by("flashinfer", NEEDS)
    assert made(20, 8) is made(132, 64)
    assert {one.int_bytes for one in Wrapper.made} == {2**20}


def test_a_library_that_is_not_there_or_too_old_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"prefill_attention: flashinfer.*pip install flashinfer-python"):
        attention_by("flashinfer", NEEDS)
    monkeypatch.setitem(sys.modules, "flashinfer", FlashInfer(OldWrapper))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"flashinfer 0\.0\.0 cannot do what is asked.*install a newer one"):
        attention_by("flashinfer", NEEDS)
    monkeypatch.delattr(varlen, "varlen_attn_out")
    with pytest.raises(ConfigError, match=r"varlen needs torch 2\.12\.1 or later.*this is torch 2\."):
        attention_by("varlen", NEEDS)


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        (replace(NEEDS, page_size=16), "engine.page_size is 16: set it to 256"),
        (replace(NEEDS, head_dim=20), "this model's is 20"),
        (replace(NEEDS, dtype=torch.float32), "not in torch.float32"),
    ],
    ids=["pages", "heads", "dtype"],
)
def test_what_torchs_kernels_are_not_made_for_is_said(needs: Needs, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        attention_by("varlen", needs)
    assert "leave engine.cuda.prefill_attention out" in str(error.value)


def test_the_key_reaches_the_runner_and_the_profile(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.cuda\.prefill_attention: varlen computes in bfloat16"):
        CudaRunner(tmp_path, settings(cuda={"prefill_attention": "varlen"}), RecordingStreams())
    runner, _ = recorded_runner(tmp_path, cuda={"prefill_attention": "varlen", "decode_buckets": [6]})
    assert runner.kernels == "triton, attention of prefills by varlen"
    runner.close()


def test_the_config_takes_every_library_that_there_is_and_no_other() -> None:
    assert get_args(CudaConfig.model_fields["prefill_attention"].annotation) == NAMES
