"""What unit tests do without, so that thousands of them take seconds: whatever they would have to wait for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .sources import ROOT, files, tree

ELSEWHERE = (  # names, and what is below them
    *("torch", "ray", "transformers", "huggingface_hub", "vl_convert", "matplotlib"),
    *("subprocess", "multiprocessing", "socket", "http.server"),
    *("pdmux_ray.bench.scripted_server.ScriptedServer", "pdmux_ray.bench.scripted_server.in_own_process"),
    "pdmux_ray.sim.fleet.simulate",
)
WAITS = ("time.sleep", "asyncio.sleep", "asyncio.start_server", "asyncio.open_connection", "httpx.get", "httpx.post")
MOMENT_S = 0.02  # that another thread or task may be given, where nothing tells that it rests


def imported(source: ast.AST) -> Iterator[str]:
    """Of other packages."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def of_other_layers(source: ast.AST) -> list[str]:
    """What it imports, and the calls with which it opens a socket or lets real time pass; a moment is none."""
    names = [name for name in imported(source) if any(name == each or name.startswith(f"{each}.") for each in ELSEWHERE)]
    calls = [node for node in ast.walk(source) if isinstance(node, ast.Call) and ast.unparse(node.func) in WAITS]
    return names + [ast.unparse(call) for call in calls if not is_moment(call)]


def is_moment(call: ast.Call) -> bool:
    seconds = call.args[0] if call.args else None
    return isinstance(seconds, ast.Constant) and isinstance(seconds.value, int | float) and seconds.value <= MOMENT_S


def test_unit_tests_start_no_process_open_no_socket_simulate_no_fleet_and_let_no_time_pass() -> None:
    found = {str(path.relative_to(ROOT)): of_other_layers(tree(path)) for path in files("tests/unit")}
    assert {path: names for path, names in found.items() if names} == {}


def test_unit_tests_use_nothing_of_the_layers_above_them() -> None:
    def above(path: Path) -> list[str]:
        return [name for name in imported(tree(path)) if name.startswith("tests.") and not name.startswith(BELOW)]

    found = {str(path.relative_to(ROOT)): above(path) for path in files("tests/unit")}
    assert {path: names for path, names in found.items() if names} == {}


BELOW = ("tests.unit.", "tests.examples.")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import ray.serve", ["ray.serve"]),
        ("from http.server import HTTPServer", ["http.server.HTTPServer"]),
        ("from pdmux_ray.sim.fleet import Run, simulate", ["pdmux_ray.sim.fleet.simulate"]),
        ("time.sleep(1.0)", ["time.sleep(1.0)"]),
        ("asyncio.sleep(PERIOD_S)", ["asyncio.sleep(PERIOD_S)"]),
        ("asyncio.sleep(0)", []),
        ("clock.sleep(100)", []),
    ],
)
def test_what_belongs_to_another_layer_is_seen(code: str, found: list[str]) -> None:
    assert of_other_layers(ast.parse(code)) == found
