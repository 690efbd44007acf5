"""The measurement of how soon KV is there after its last layer, with a tiny model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from tiny_models import save_tiny

from pdmux_ray.bench import push

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed (extra nixl)"),
]

CONFIG = """
applications:
  - name: pdmux
    import_path: pdmux_ray.serve.app:build_app
    args:
      engine: {device: cpu, dtype: float32, threads: 1, page_size: 4, kv_cache_gib: 0.001, chunk_tokens: 8}
"""


def test_every_case_is_a_row_with_the_blocks_that_its_prompt_was_pushed_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny("llama", tmp_path / "model")
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    push.main(["--config", str(config), "--model", str(model), "--prompts", "20", "45", "--tls", "tcp,self", "--repeats", "2"])
    told = capsys.readouterr().out
    rows = [line.split()[1:5] for line in told.splitlines() if line.startswith("tcp,self")]
    layers, page_bytes = 3, 2 * 4 * 16 * 4  # heads, slots, head size, bytes of a number
    megabytes = [f"{2 * layers * pages * page_bytes / 1e6:.2f}" for pages in (5, 11)]
    assert rows == [  # of 3 and 6 chunks the last one in three parts
        ["chunked", "20", megabytes[0], "5"],
        ["chunked", "45", megabytes[1], "8"],
        ["time_shared", "20", megabytes[0], "3"],
        ["time_shared", "45", megabytes[1], "3"],
    ]
    assert all(float(share) > 0 for share in re.findall(r"([\d.]+)% \[", told))
