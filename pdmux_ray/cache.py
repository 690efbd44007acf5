"""Where this machine keeps what is made once: models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """$PDMUX_CACHE/`name`, by default ~/.cache/pdmux-ray/`name`; it may not exist yet."""
    return Path(os.environ.get("PDMUX_CACHE") or Path.home() / ".cache" / "pdmux-ray") / name
