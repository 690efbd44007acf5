from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

CHILD = """
import os, sys, time
from pdmux_ray.bench.simulated_runs import simulating
def begin(): pass
if __name__ == "__main__":
    with simulating(1, begin) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 60).result()
"""


def test_processes_that_simulate_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "it.py").write_text(CHILD)
    with subprocess.Popen([sys.executable, str(tmp_path / "it.py")], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        worker = psutil.Process(int(command.stdout.readline()))
        command.send_signal(signal.SIGKILL)
        worker.wait(timeout=30)
    assert not worker.is_running()
