"""How much is measured: for a GPU, for a quick look at one, and for a dry run on the CPU. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdmux_ray.gpu_check.models import CODELLAMA_34B, LLAMA_8B, SMALL, TINY, ModelShape


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens."""

    small: ModelShape  # of the check of tokens
    middle: ModelShape  # of steps
    big: ModelShape  # of the headline
    copy_bytes: int  # of a copy whose bandwidth is measured: far more than the cache
    matrix: int  # rows and columns of the matrices whose product is measured
    timings: int  # of each of these
    prompts: tuple[int, ...]  # lengths of the check of tokens
    answers: int  # tokens of each of its answers
    decode_batch: int
    decode_context: int
    decode_steps: int  # that are timed on each level
    prefill_tokens: int
    prefill_blocks: int  # that are timed on each level
    kv_gib: tuple[float, float, float]  # the pools of small, middle and big
    kernel_context: int  # longest context that kernels are compared at
    head_dims: tuple[int, ...]  # that they are compared at
    profile_prompts: tuple[int, ...]  # of a quick profile: new tokens of a prefill
    profile_contexts: tuple[int, ...]  # of a decode in it
    profile_batches: tuple[int, ...]
    profile_repeats: int  # times of each of its points
    max_batch: int  # of the headline
    divide: float  # its lengths are divided by this
    headline_contexts: tuple[int, ...]  # its requests are shortened to one of these: the first that there is time for
    least_requests: int  # of each of its runs: when 29 of 29 are good, 90 % are at a confidence of 95 %
    chunks: tuple[int, ...]  # sizes of chunks that the headline compares with


GPU = Sizes(
    small=SMALL,
    middle=LLAMA_8B,
    big=CODELLAMA_34B,
    copy_bytes=2**30,
    matrix=8192,
    timings=10,
    prompts=(3, 17, 64, 129, 400, 33, 700, 90),
    answers=48,
    decode_batch=32,
    decode_context=2048,
    decode_steps=100,
    prefill_tokens=8192,
    prefill_blocks=8,
    kv_gib=(0.5, 20.0, 44.0),
    kernel_context=3000,
    head_dims=(64, 128, 256),
    profile_prompts=(32, 256, 1024, 4096),
    profile_contexts=(256, 6000),
    profile_batches=(1, 8, 32),
    profile_repeats=7,
    max_batch=64,
    divide=1.0,
    headline_contexts=(16_384, 8192, 4096),
    least_requests=30,
    chunks=(512, 1024, 2048),
)
QUICK = replace(GPU, decode_steps=40, prefill_blocks=4, timings=5, answers=16, head_dims=(128,))
DRY = Sizes(
    small=TINY,
    middle=TINY,
    big=TINY,
    copy_bytes=2**16,
    matrix=32,
    timings=2,
    prompts=(3, 12),
    answers=3,
    decode_batch=2,
    decode_context=12,
    decode_steps=3,
    prefill_tokens=24,
    prefill_blocks=2,
    kv_gib=(0.001, 0.001, 0.001),
    kernel_context=24,
    head_dims=(16,),
    profile_prompts=(4, 8, 16),
    profile_contexts=(8,),
    profile_batches=(1, 2, 3),
    profile_repeats=9,
    max_batch=4,
    divide=512.0,
    headline_contexts=(TINY.context_length,),
    least_requests=3,
    chunks=(8, 16, 32),
)


def sizes_for(device: str, quick: bool) -> Sizes:
    return DRY if device == "recording" else QUICK if quick else GPU
