"""Mooncake's and Azure's formats: what is read, and how a malformed file is refused. The shipped samples are real data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pdmux_ray.errors import ConfigError
from pdmux_ray.workload.lines import Limits, TraceError
from pdmux_ray.workload.outline import Outline, reusable_fraction
from pdmux_ray.workload.traces import read_azure, read_mooncake

SAMPLES = Path(__file__).parents[3] / "configs" / "traces"
GOOD = {"timestamp": 27482, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 9]}
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:15:46.6805900,374,44"


def written(tmp_path: Path, *lines: str | bytes) -> Path:
    path = tmp_path / "trace"
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


def test_a_mooncake_line_is_a_request_with_its_blocks(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(GOOD), "", json.dumps(GOOD | {"timestamp": 28982}))
    assert read_mooncake(path).requests == [Outline(1030, 52, (46, 47, 9), 0.0), Outline(1030, 52, (46, 47, 9), 1.5)]


def test_an_azure_row_is_a_request_that_shares_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER, ROW, "2023-11-16 18:15:48.1805900,600,7")
    assert read_azure(path).requests == [Outline(374, 44, (0,), 0.0), Outline(600, 7, (1, 2), 1.5)]


def test_lines_of_windows_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, b"\xef\xbb\xbf" + HEADER.encode() + b"\r", ROW + "\r")
    assert [request.prompt_tokens for request in read_azure(path).requests] == [374]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"timestamp": -1}, "timestamp must be"),
        ({"timestamp": "0"}, "timestamp must be"),
        ({"timestamp": 27481}, "before that of the line above"),
        ({"input_length": 0}, "input_length must be an integer from 1"),
        ({"input_length": 1030.0}, "input_length must be"),
        ({"input_length": True}, "input_length must be"),
        ({"output_length": -3}, "output_length must be"),
        ({"output_length": None}, "output_length must be"),
        ({"hash_ids": "46"}, "hash_ids must be a list"),
        ({"hash_ids": [1, 2, -3]}, "hash_ids must be a list"),
        ({"hash_ids": [1, 2, 2**63]}, "hash_ids must be a list"),
        ({"hash_ids": [1, 2]}, "has 2 hash_ids, but 1030 tokens are 3 blocks of 512"),
    ],
)
def test_a_wrong_mooncake_field_is_named_with_its_line(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = written(tmp_path, json.dumps(GOOD), json.dumps(GOOD | change))
    with pytest.raises(TraceError, match=f"trace, line 2: .*{words}"):
        read_mooncake(path)


@pytest.mark.parametrize(
    "text", ["{", "[]", "7", "NaN", '{"timestamp": 0}', "[" * 100_000, '{"timestamp": ' + "9" * 5000 + "}"]
)
def test_what_is_no_mooncake_request_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="line 1"):
        read_mooncake(written(tmp_path, text))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("2023-11-16 18:15:46.68,374", "has 2 columns, not 3"),
        ("yesterday,374,44", "TIMESTAMP must be like"),
        ("2023-11-16T18:15:47Z,374,44", "TIMESTAMP must be like"),
        ("2023-11-16 18:15:45,374,44", "before that of the line above"),
        ("2023-11-16 18:15:47,0,44", "ContextTokens must be an integer from 1"),
        ("2023-11-16 18:15:47,3.5,44", "must be whole numbers"),
        ("2023-11-16 18:15:47,374,-4", "must be whole numbers"),
        ("2023-11-16 18:15:47,374,99999999", "GeneratedTokens must be"),
    ],
)
def test_a_wrong_azure_cell_is_named_with_its_line(tmp_path: Path, row: str, words: str) -> None:
    with pytest.raises(TraceError, match=f"line 3: .*{words}"):
        read_azure(written(tmp_path, HEADER, ROW, row))


def test_a_wrong_header_or_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 1: the first line must be TIMESTAMP,ContextTokens,GeneratedTokens"):
        read_azure(written(tmp_path, ROW))
    with pytest.raises(TraceError, match="has no requests"):
        read_azure(written(tmp_path, HEADER))
    with pytest.raises(TraceError, match="has no requests"):
        read_mooncake(written(tmp_path))


def test_a_file_is_read_within_its_limits(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(GOOD), json.dumps(GOOD), json.dumps(GOOD))
    longest = len(json.dumps(GOOD))
    assert len(read_mooncake(path, Limits(line_bytes=longest, lines=3)).requests) == 3
    with pytest.raises(TraceError, match="line 1: the line is longer than"):
        read_mooncake(path, Limits(line_bytes=longest - 1))
    with pytest.raises(TraceError, match="line 3: more than 2 lines"):
        read_mooncake(path, Limits(lines=2))
    with pytest.raises(TraceError, match="Cut the file"):
        read_mooncake(path, Limits(file_bytes=2 * longest))


def test_a_file_that_cannot_be_read_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="absent: cannot be read: No such file"):
        read_mooncake(tmp_path / "absent")
    with pytest.raises(TraceError, match="line 2: is not UTF-8"):
        read_mooncake(written(tmp_path, json.dumps(GOOD), b"\xff\xfe"))


def test_a_trace_gives_its_first_requests_and_no_more_than_it_has() -> None:
    trace = read_mooncake(SAMPLES / "mooncake_conversation_sample.jsonl")
    assert trace.outlines(5, seed=1) == trace.outlines(765, seed=2)[:5]
    with pytest.raises(ConfigError, match="has 765 requests: ask for no more, not for 766"):
        trace.outlines(766, seed=1)


def test_the_mooncake_sample_is_like_the_whole_trace() -> None:
    requests = read_mooncake(SAMPLES / "mooncake_conversation_sample.jsonl").requests
    assert np.mean([request.prompt_tokens for request in requests]) == pytest.approx(12_035, rel=0.02)
    assert np.mean([request.output_tokens for request in requests]) == pytest.approx(343, rel=0.02)
    assert reusable_fraction(requests) == pytest.approx(0.366, rel=0.02)


def test_the_azure_sample_is_like_the_whole_trace() -> None:
    requests = read_azure(SAMPLES / "azure_conversation_sample.csv").requests
    assert np.mean([request.prompt_tokens for request in requests]) == pytest.approx(1155, rel=0.03)
    assert np.mean([request.output_tokens for request in requests]) == pytest.approx(211, rel=0.03)
