"""The picture of a comparison of single latencies; it needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmux_ray.bench import peer

pytestmark = pytest.mark.bench


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    samples = {f"ITL {n}": [0.01] for n in peer.ITL_CONCURRENCY} | {f"TTFT {n}": [1.0] for n in peer.TTFT_PROMPT_TOKENS}
    peer.plot(samples, samples, str(tmp_path / "peer.png"))
    assert (tmp_path / "peer.png").read_bytes().startswith(b"\x89PNG")
