"""Reading a file of other people's data line by line, within limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdmux_ray.errors import ConfigError


class TraceError(ConfigError):
    """A trace or a file of prompts is malformed or too large; the message names file, line and what is wrong."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        super().__init__(f"{path}{'' if line is None else f', line {line}'}: {problem}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a file may be; more is an error before it is in memory."""

    line_bytes: int = 1 << 20  # a request of 128 Ki tokens in Mooncake's format has about 2 KiB
    lines: int = 1_000_000
    file_bytes: int = 1 << 30  # what is read is kept in memory


def numbered_lines(path: Path, limits: Limits) -> Iterator[tuple[int, str]]:
    """(number from 1, text without its end) of every line that is not blank. Raises TraceError."""
    try:
        with path.open("rb") as file:
            number = size = 0
            while line := file.readline(limits.line_bytes + 2):  # 2: room for \r\n
                number, size = number + 1, size + len(line)
                if number > limits.lines:
                    raise TraceError(path, number, f"more than {limits.lines} lines. Cut the file.")
                if size > limits.file_bytes:
                    raise TraceError(path, number, f"more than {limits.file_bytes} bytes up to here. Cut the file.")
                text = line.rstrip(b"\r\n")
                if len(text) > limits.line_bytes:
                    raise TraceError(path, number, f"the line is longer than {limits.line_bytes} bytes.")
                if text.strip():
                    yield number, text.decode("utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise TraceError(path, number, "is not UTF-8 text.") from None
