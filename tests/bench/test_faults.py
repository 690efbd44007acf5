"""The commands that try faults, from their command line to their table, and the namespaces that they need."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from pdmux_ray.bench import faults, namespaces

pytestmark = pytest.mark.bench

NO_NAMESPACES = namespaces.why_not()
SERVER = "import socket; s = socket.create_server(('0.0.0.0', 5000))\nwhile True: s.accept()[0].sendall(b'here')"
CLIENT = "import socket, sys; s = socket.create_connection((sys.argv[1], 5000), timeout=0.5); print(s.recv(4).decode())"


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed (extra nixl)")
def test_instances_that_are_killed_or_refuse_leave_right_answers_and_no_page(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--model", "tiny", "--points", "1", "--requests", "3", "--longest", "300"]
    faults.main([*few, "--faults", "refuse,kill-prefill,freeze-decode"])  # its status: also how soon a busy machine notices
    head, _, *rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    found = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["| fault"] for row in found] == ["| undisturbed", "| refuse", "| kill-prefill", "| freeze-decode"]
    bad = ("wrong", "failed", "leaked pages", "not well")
    assert [[row[column] for column in bad] for row in found] == [["0"] * len(bad)] * len(found)
    assert "landed" in found[0]["transfers |"]


def reaches(nodes: namespaces.Namespaces) -> bool:
    command = nodes.inside(1, [sys.executable, "-c", CLIENT, nodes.address(0)])
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == "here"


def wait_until_reached(nodes: namespaces.Namespaces, server: subprocess.Popen[bytes]) -> None:
    """However long half a second is on a busy machine: an attempt has no longer, for the sake of those that must fail."""
    while not reaches(nodes):
        assert server.poll() is None


@pytest.mark.skipif(NO_NAMESPACES is not None, reason=f"no network namespaces here: {NO_NAMESPACES}")
@pytest.mark.parametrize("silently", [True, False])
def test_two_namespaces_reach_each_other_by_a_link_that_can_be_cut_and_healed(silently: bool) -> None:
    with namespaces.Namespaces() as nodes:
        server = subprocess.Popen(nodes.inside(0, [sys.executable, "-c", SERVER]))
        try:
            wait_until_reached(nodes, server)
            nodes.cut(silently=silently)
            assert not reaches(nodes)
            nodes.heal()
            wait_until_reached(nodes, server)
        finally:
            server.kill()
            server.wait()
        names = nodes.names
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not [name for name in names if name in left]
