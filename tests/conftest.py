"""How many examples a property is tried with is said in `tests/examples.py`, by profile: `--hypothesis-profile`.

What starts real servers, sends them load or opens pages is tried a second time when it fails: on a machine that others use, a
process can stand still for seconds, and no limit that would still find a hung server is beyond that. The summary has each first
try that failed, with its traceback (RERUN): a test that is there again and again has a defect.
"""

from __future__ import annotations

import signal

import pytest

import tests.examples  # noqa: F401  # registers the profiles

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell that starts the tests in the background: Ctrl-C is tested, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

REAL_TIME = ("ray", "bench", "browser")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(name) for name in REAL_TIME):
            item.add_marker(pytest.mark.flaky(reruns=1))
