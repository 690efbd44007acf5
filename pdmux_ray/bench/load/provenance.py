"""Where a measurement comes from, as notes for its report: the command, the time, the software and the client's machine."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil

from pdmux_ray import __version__

SECRETS = ("--api-key",)  # options whose value is for nobody's eyes


def provenance() -> list[str]:
    """Of what this process measures now."""
    software = f"pdmux-ray {__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}"
    return [
        command_here(),
        f"Measured: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        f"Client: {software}; {psutil.cpu_count()} cores of {_processor()}.",
    ]


def command_here() -> str:
    """What this process was called with."""
    return f"Command: {command_line([Path(sys.argv[0]).name, *sys.argv[1:]])}"


def command_line(argv: Sequence[str]) -> str:
    """As one would type it, without secrets: those of SECRETS and the user part of URLs."""
    shown: list[str] = []
    for index, argument in enumerate(argv):
        option, equals, _ = argument.partition("=")
        if index and argv[index - 1] in SECRETS:
            shown.append("…")
        elif equals and option in SECRETS:
            shown.append(f"{option}=…")
        else:
            shown.append(re.sub(r"://[^/@\s]*@", "://…@", argument))
    return " ".join(argument if argument.endswith("…") else shlex.quote(argument) for argument in shown)


def _processor() -> str:
    """Its name, or at least its architecture."""
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.machine()
