"""Answers through one instance that prefills and one that decodes are those of one alone, whatever becomes of either.

    python -m pdmux_ray.bench.handoffs [--config FILE] [--requests N] [--points K] [--faults kill-prefill,...]

Random requests (lengths, shared beginnings, seeds, penalties, greedy ones) go to a server of that config, where all KV is
fetched; an engine in this process, without Ray, has said what each answer must be. First nothing happens. Then, for each fault
and as often as --points says, the requests run again, and at a random moment an instance is killed, or frozen for some seconds.
After each round the instances must be linked again, and every page free. Exit status 1 when an answer differs, a request fails
or a page is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console

from pdmux_ray.bench.server import running
from pdmux_ray.config import load_app_config
from pdmux_ray.errors import PdmuxError
from pdmux_ray.generate import Generator
from pdmux_ray.types import SamplingParams

ROOT = Path(__file__).parents[2]
FAULTS = ("kill-prefill", "freeze-prefill", "kill-decode", "freeze-decode")
SETTINGS = [
    f"--set {setting}"
    for setting in (
        *("topology.prefill=1", "topology.mux=0", "topology.decode=1", "gateway.routing.policy=remote"),
        "engine.kv_cache_gib=0.1",  # of the demo model 4,600 tokens: what one round has cached is mostly gone in the next
    )
]
AT_ONCE = 6  # requests
FROZEN_S = (0.5, 8.0)  # shorter and longer than an instance is waited for
WELL_S = 120.0  # for a killed instance to be replaced, and for pages to come back
ANSWER_S = 120.0
STEMS = 4  # beginnings that prompts share
TOKEN_IDS = (1000, 30_000)


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and what must come of it."""

    prompt: list[int]
    params: dict[str, Any]
    text: str
    finish: str

    @property
    def body(self) -> dict[str, Any]:
        return {"prompt": self.prompt, **self.params}


@dataclass(frozen=True, slots=True)
class Round:
    """What came of all requests once. `trouble`: of the instances or their pages afterwards."""

    took_s: float
    failed: int
    wrong: int
    trouble: str | None

    @property
    def good(self) -> bool:
        return not self.failed and not self.wrong and self.trouble is None


def draw(config: Path, count: int, longest: int, rng: random.Random) -> Iterator[Case]:
    """Requests with the answers of an engine of this config, in this process."""
    stems = [[rng.randrange(*TOKEN_IDS) for _ in range(longest)] for _ in range(STEMS)]
    with Generator(load_app_config(config)) as generator:
        for seed in range(count):
            length = max(1, round(longest ** rng.random()))
            shared = rng.randrange(length) if rng.random() < 0.5 else 0
            prompt = rng.choice(stems)[:shared] + [rng.randrange(*TOKEN_IDS) for _ in range(length - shared)]
            params: dict[str, Any] = {"max_tokens": rng.randrange(1, 24), "temperature": rng.choice([0.0, 1.0]), "seed": seed}
            params |= {"repetition_penalty": rng.choice([1.0, 1.2]), "ignore_eos": True}
            (answer,) = generator.generate([prompt], SamplingParams(**params))
            yield Case(prompt, params, answer.text, answer.finish.value if answer.finish else "")


class Pair:
    """A running server with an instance that prefills and one that decodes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._model = json.loads(self._get("/v1/models"))["data"][0]["id"]

    def answer(self, case: Case) -> bool:
        """Whether it is the right one. Raises OSError when there is none."""
        body = json.dumps({"model": self._model, **case.body}).encode()
        request = urllib.request.Request(f"{self._url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            choice = json.load(reply)["choices"][0]
        return (choice["text"], choice["finish_reason"]) == (case.text, case.finish)

    def trouble(self, killed: str | None) -> str | None:
        """Of the instances, or their pages: none when they are linked and every page is free. `killed`: one that is no more."""
        listed = self.instances()
        roles = {each["role"]: each for each in listed if not each["trouble"] and each["id"] != killed}
        if roles.keys() != {"prefill", "decode"} or roles["prefill"]["id"] not in roles["decode"]["peers"]:
            return f"not linked: {[(each['id'], each['role'], each['trouble'], each['peers']) for each in listed]}"
        metrics = self._get("/metrics").decode()
        pages, free = (_sum(metrics, f"pdmux_instance_{name}") for name in ("pages", "free_pages"))
        return None if pages == free else f"{pages - free:.0f} pages are not free"

    def instances(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.loads(self._get("/admin/instances"))["instances"]
        return listed

    def counts(self) -> str:
        """How many transfers landed, and what the others were lost by."""
        found = re.findall(r'^pdmux_fetches_total\{.*reason="(\w+)"\} (\S+)$', self._get("/metrics").decode(), re.MULTILINE)
        return ", ".join(f"{reason} {float(count):.0f}" for reason, count in found if float(count))

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self._url + path, timeout=30) as reply:
            body: bytes = reply.read()
            return body


def _sum(metrics: str, name: str) -> float:
    return sum(map(float, re.findall(rf"^{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)))


def process_of(instance: dict[str, Any]) -> psutil.Process:
    """The one that listens where its peers reach it."""
    port = int(instance["kv_address"].rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        here = connection.laddr  # empty for a socket that is not bound
        if connection.status == psutil.CONN_LISTEN and here and here.port == port and connection.pid is not None:
            return psutil.Process(connection.pid)
    raise PdmuxError(f"no process of this machine listens on port {port}, where instance {instance['id']} should")


def play(pair: Pair, cases: Sequence[Case], fault: str | None, after_s: float, frozen_s: float) -> Round:
    """All cases, `AT_ONCE` at a time; the fault happens `after_s` after the first was sent."""
    begin_s, killed = time.monotonic(), None
    with ThreadPoolExecutor(AT_ONCE) as clients:
        answers = [clients.submit(pair.answer, case) for case in cases]
        if fault is not None:
            killed = _harm(pair, fault, after_s, frozen_s)
        results = [_result(answer) for answer in answers]
    took_s = time.monotonic() - begin_s
    end_s = time.monotonic() + WELL_S
    while (trouble := _trouble(pair, killed)) is not None and time.monotonic() < end_s:
        time.sleep(0.5)
    return Round(took_s, results.count("failed"), results.count("wrong"), trouble)


def _result(answer: Future[bool]) -> Literal["right", "wrong", "failed"]:
    try:
        return "right" if answer.result() else "wrong"
    except OSError:
        return "failed"


def _trouble(pair: Pair, killed: str | None) -> str | None:
    try:
        return pair.trouble(killed)
    except urllib.error.URLError as error:
        return f"the server does not answer: {error}"


def _harm(pair: Pair, fault: str, after_s: float, frozen_s: float) -> str | None:
    """The id of the instance that is no more."""
    what, role = fault.split("-")
    instance = next(each for each in pair.instances() if each["role"] == role)
    process = process_of(instance)
    time.sleep(after_s)
    if what == "kill":
        process.kill()
        return str(instance["id"])
    process.suspend()
    time.sleep(frozen_s)
    with contextlib.suppress(psutil.NoSuchProcess):  # what is frozen for long is replaced
        process.resume()
    return None


def _faults(text: str) -> list[str]:
    chosen = [name for name in text.split(",") if name]
    unknown = sorted(set(chosen) - set(FAULTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(FAULTS)}")
    return chosen


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.handoffs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "1p1d.yaml", help="default: configs/1p1d.yaml")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="of each round; default 200")
    parser.add_argument("--longest", type=int, default=2000, metavar="TOKENS", help="of a prompt; default 2000")
    parser.add_argument("--points", type=int, default=20, metavar="K", help="rounds of each fault; default 20")
    parser.add_argument("--faults", type=_faults, default=list(FAULTS), metavar="F,F,…", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args, out = parser().parse_args(argv), Console(soft_wrap=True)
    rng = random.Random(args.seed)
    cases = list(draw(args.config, args.requests, args.longest, rng))
    command = f"{sys.executable} -m pdmux_ray.serve.launch {args.config} --port {{port}} {' '.join(SETTINGS)}"
    with running(command, "") as server:
        pair = Pair(server.url)
        rounds = [play(pair, cases, None, 0.0, 0.0)]
        out.print(f"undisturbed: {_line(rounds[0])}; {pair.counts()}")
        for fault in args.faults:
            for _ in range(args.points):
                rounds.append(play(pair, cases, fault, rng.uniform(0, 0.8 * rounds[0].took_s), rng.uniform(*FROZEN_S)))
                out.print(f"{fault}: {_line(rounds[-1])}")
    bad = sum(not each.good for each in rounds)
    out.print(f"{len(rounds) * len(cases)} requests in {len(rounds)} rounds, {bad} of which were not good")
    return 1 if bad else 0


def _line(each: Round) -> str:
    return f"{each.took_s:.1f} s, {each.failed} failed, {each.wrong} wrong" + (f", {each.trouble}" if each.trouble else "")


if __name__ == "__main__":
    sys.exit(main())
