"""Where a model's files are: `model:` in a config becomes a directory on this machine. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pdmux_ray.errors import ConfigError
from pdmux_ray.model import demo

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]
_HUB_SKIP = ["original/*", "onnx/*", "consolidated*"]  # second copies of the weights in other layouts


def resolve(model: str, weights: bool = True) -> Path:
    """Takes "demo", a Hugging Face directory or a hub id; returns a directory with config.json, tokenizer.json, safetensors.

    The demo model is prepared on first use, a hub model downloaded. `weights=False` also takes a directory without
    safetensors (for random weights). Raises ConfigError that names what is missing and what to do.
    """
    if model == "demo":
        return demo.prepare()
    return local_directory(model, weights) or _checked(_download(model), weights)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What `resolve` has found, for processes that may run on other machines. Arguments of `resolve`, and its result."""

    model: str
    weights: bool
    directory: Path

    @classmethod
    def of(cls, model: str, weights: bool = True) -> ModelFiles:
        """Raises ConfigError as `resolve` does."""
        return cls(model, weights, resolve(model, weights))

    def here(self) -> Path:
        """On the machine of whoever asks, where it may have to be prepared or downloaded first. Raises ConfigError."""
        return self.directory if self.directory.is_dir() else resolve(self.model, self.weights)


def local_directory(model: str, weights: bool = True) -> Path | None:
    """What `resolve` returns for a directory; None for "demo" and a hub id, which are not looked up. Raises ConfigError."""
    if model == "demo":
        return None
    directory = Path(model).expanduser().absolute()
    if model and directory.is_dir():
        return _checked(directory, weights)
    if not _HUB_ID.fullmatch(model) or model.startswith((".", "~")):
        raise ConfigError(f"model {model!r} is neither 'demo', nor a directory on this machine, nor a hub id (owner/name)")
    return None


def _checked(directory: Path, weights: bool) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    if weights and not any(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(
            f"model directory {directory} lacks {', '.join(missing)}: it must be a Hugging Face directory with a fast "
            "tokenizer and safetensors weights (`save_pretrained` of model and tokenizer writes one)"
        )
    return directory


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIP))
    except Exception as error:  # the client raises its own, httpx's and the operating system's errors
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"model {hub_id!r} is no directory here, and it cannot be had from the hub "
            f"({type(error).__name__}: {reason[0] if reason else 'no message'}). Put its files on this machine and name the "
            "directory as `model:`, or use `model: demo`."
        ) from error
