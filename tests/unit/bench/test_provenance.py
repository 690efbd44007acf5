from __future__ import annotations

import pytest

from pdmux_ray.bench.load.provenance import command_line, provenance


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["pdmux", "bench", "a b"], "pdmux bench 'a b'"),
        (["pdmux", "--api-key", "sk-1", "--out", "d"], "pdmux --api-key … --out d"),
        (["pdmux", "--api-key=sk-1"], "pdmux --api-key=…"),
        (["pdmux", "peer=http://me:pass@host:1/v1"], "pdmux 'peer=http://…@host:1/v1'"),
    ],
)
def test_a_command_line_can_be_typed_again_and_has_no_secrets(argv: list[str], text: str) -> None:
    assert command_line(argv) == text


def test_a_report_can_say_how_when_and_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/pdmux", "bench", "http://h"])
    command, measured, client = provenance()
    assert command == "Command: pdmux bench http://h"
    assert measured.endswith(" UTC.")
    assert "cores of" in client
