"""The table of docs/workloads.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmux_ray.bench import workload_figures
from pdmux_ray.errors import PdmuxError

SAMPLE = Path(__file__).parents[3] / "configs" / "traces" / "mooncake_conversation_sample.jsonl"
DOCUMENT = Path(__file__).parents[3] / "docs" / "workloads.md"


def test_the_document_states_the_figures_of_our_sample_of_the_mooncake_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert workload_figures.main([f"mooncake:{SAMPLE}"]) == 0
    name, *figures = [cell.strip() for cell in capsys.readouterr().out.strip().strip("|").split("|")]
    assert name == "mooncake:mooncake_conversation_sample.jsonl"
    assert f"| {' | '.join(figures).replace('%', ' %')} |" in DOCUMENT.read_text(encoding="utf-8")


def test_as_many_requests_are_drawn_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    workload_figures.main(["fixed:600,10", "--count", "20"])
    assert capsys.readouterr().out == ("| fixed:600,10 | 20 | 600 / 600 / 600 / 600 / 600 | 10 / 10 / 10 / 10 / 10 | 0.0% |\n")


def test_texts_have_no_figures(tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("Hello\n")
    with pytest.raises(PdmuxError, match="up to a tokenizer"):
        workload_figures.main([f"prompts:{tmp_path / 'texts'}"])
