"""Answers through one instance that prefills and one that decodes are those of one alone, whatever becomes of either.

    python -m pdmux_ray.bench.handoffs [--config FILE] [--requests N] [--points K] [--per-fault N] [--faults kill-prefill,...]

Random requests (lengths, shared beginnings, seeds, penalties, greedy ones) go to a server of that config, where all KV is
fetched; an engine in this process, without Ray, has said what each answer must be. First nothing happens. Then, for each fault
and as often as --points says, some of the requests, drawn anew, run again, and at a random moment an instance is killed, or
frozen for some seconds; or clients close their connections at random moments. After each round the instances must be linked
again, and every page free. Exit status 1 when an answer differs, a request fails or a page is missing. With Ray and HTTP, so
each round takes some ten seconds; `faults` tries more faults, between two processes without either.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import sys
import time
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil
from rich.console import Console

from pdmux_ray.bench.server import running
from pdmux_ray.config import load_app_config
from pdmux_ray.errors import PdmuxError
from pdmux_ray.generate import Generator
from pdmux_ray.report.progress import Progress
from pdmux_ray.types import SamplingParams

ROOT = Path(__file__).parents[2]
UNDISTURBED, LEAVE = "undisturbed", "leave-client"
FAULTS = ("kill-prefill", "freeze-prefill", "kill-decode", "freeze-decode", LEAVE)
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
FIGURES_S = 2.5  # that a gateway's figures of the instances, and its own, may be old
STEMS = 4  # beginnings that prompts share
TOKEN_IDS = (1000, 30_000)
_COLUMNS = ("fault", "rounds", "requests", "left", "wrong", "failed", "leaked pages", "longest answer, s", "not well after")

Verdict: TypeAlias = Literal["right", "wrong", "failed", "left"]


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
    """What came of its requests. `trouble`: of the instances or their pages afterwards; `leaked`: pages that are not free."""

    fault: str
    took_s: float
    longest_s: float  # of an answer
    verdicts: tuple[Verdict, ...]
    leaked: int
    trouble: str | None

    @property
    def good(self) -> bool:
        return not {"wrong", "failed"} & set(self.verdicts) and self.trouble is None


def draw_requests(count: int, longest: int, rng: random.Random) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Prompts, half of which share a beginning with others, and how they are to be answered."""
    stems = [[rng.randrange(*TOKEN_IDS) for _ in range(longest)] for _ in range(STEMS)]
    for seed in range(count):
        length = max(1, round(longest ** rng.random()))
        shared = rng.randrange(length) if rng.random() < 0.5 else 0
        prompt = rng.choice(stems)[:shared] + [rng.randrange(*TOKEN_IDS) for _ in range(length - shared)]
        params: dict[str, Any] = {"max_tokens": rng.randrange(1, 24), "temperature": rng.choice([0.0, 1.0]), "seed": seed}
        yield prompt, params | {"repetition_penalty": rng.choice([1.0, 1.2]), "ignore_eos": True}


def draw(config: Path, count: int, longest: int, rng: random.Random) -> Iterator[Case]:
    """Requests with the answers of an engine of this config, in this process."""
    with Generator(load_app_config(config)) as generator:
        for prompt, params in draw_requests(count, longest, rng):
            (answer,) = generator.generate([prompt], SamplingParams(**params))
            yield Case(prompt, params, answer.text, answer.finish.value if answer.finish else "")


class Pair:
    """A running server with an instance that prefills and one that decodes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._model = json.loads(self._get("/v1/models"))["data"][0]["id"]

    def answer(self, case: Case, leave_s: float | None) -> tuple[Verdict, float]:
        """What came of it, and after how long. The client leaves when `leave_s` have passed without an answer."""
        body = json.dumps({"model": self._model, **case.body}).encode()
        request = urllib.request.Request(f"{self._url}/v1/completions", body, {"Content-Type": "application/json"})
        begin_s = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S if leave_s is None else leave_s) as reply:
                choice = json.load(reply)["choices"][0]
        except (OSError, http.client.HTTPException, ValueError):  # ValueError: half an answer
            took_s = time.monotonic() - begin_s
            return "failed" if leave_s is None or took_s < leave_s else "left", took_s
        right = (choice["text"], choice["finish_reason"]) == (case.text, case.finish)
        return "right" if right else "wrong", time.monotonic() - begin_s

    def aftermath(self, killed: str | None) -> tuple[str | None, int]:
        """What is wrong with the instances or their pages, and how many of these are not free. `killed`: one that has gone."""
        listed, held = self.instances(), self._held_pages()
        roles = {each["role"]: each for each in listed if not each["trouble"] and each["id"] != killed}
        if roles.keys() != {"prefill", "decode"} or roles["prefill"]["id"] not in roles["decode"]["peers"]:
            return f"not linked: {[(each['id'], each['role'], each['trouble'], each['peers']) for each in listed]}", held
        return (f"{held} pages are not free", held) if held else (None, 0)

    def instances(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.loads(self._get("/admin/instances"))["instances"]
        return listed

    def counts(self) -> str:
        """How many transfers of the instances that there are have landed, and what the others were lost by."""
        time.sleep(FIGURES_S)
        found = re.findall(r'^pdmux_fetches_total\{.*reason="(\w+)"\} (\S+)$', self._get("/metrics").decode(), re.MULTILINE)
        return ", ".join(f"{reason} {float(count):.0f}" for reason, count in found if float(count))

    def _held_pages(self) -> int:
        metrics = self._get("/metrics").decode()
        return round(_sum(metrics, "pdmux_instance_pages") - _sum(metrics, "pdmux_instance_free_pages"))

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


@dataclass(frozen=True, slots=True)
class Harm:
    """What happens in a round: `after_s` from its begin, for `frozen_s`; or the longest that a client waits for its answer."""

    fault: str
    after_s: float = 0.0
    frozen_s: float = 0.0
    patience_s: float = 0.0


def play(pair: Pair, cases: Sequence[Case], harm: Harm, rng: random.Random) -> Round:
    """All cases, `AT_ONCE` at a time."""
    begin_s, killed = time.monotonic(), None
    leaves = [rng.uniform(0.001, harm.patience_s) if harm.patience_s else None for _ in cases]
    with ThreadPoolExecutor(AT_ONCE) as clients:
        answers = [clients.submit(pair.answer, case, leave) for case, leave in zip(cases, leaves, strict=True)]
        if harm.after_s:
            killed = _harm(pair, harm)
        results = [answer.result() for answer in answers]
    took_s = time.monotonic() - begin_s
    end_s = time.monotonic() + WELL_S
    while (found := _aftermath(pair, killed))[0] is not None and time.monotonic() < end_s:
        time.sleep(0.5)
    verdicts, times_s = zip(*results, strict=True)
    return Round(harm.fault, took_s, max(times_s), verdicts, found[1], found[0])


def _aftermath(pair: Pair, killed: str | None) -> tuple[str | None, int]:
    try:
        return pair.aftermath(killed)
    except OSError as error:
        return f"the server does not answer: {error}", 0


def _harm(pair: Pair, harm: Harm) -> str | None:
    """The id of the instance that is no more."""
    what, role = harm.fault.split("-")
    instance = next(each for each in pair.instances() if each["role"] == role)
    process = process_of(instance)
    time.sleep(harm.after_s)
    if what == "kill":
        process.kill()
        return str(instance["id"])
    process.suspend()
    time.sleep(harm.frozen_s)
    with contextlib.suppress(psutil.NoSuchProcess):  # what is frozen for long is replaced
        process.resume()
    return None


def some_of(known: Collection[str], text: str) -> list[str]:
    """For argparse: the names of a list with commas."""
    chosen = [name for name in text.split(",") if name]
    if unknown := sorted(set(chosen) - set(known)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(known)}")
    return chosen


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.handoffs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "1p1d.yaml", help="default: configs/1p1d.yaml")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="without a fault, all at first; default 200")
    parser.add_argument("--longest", type=int, default=2000, metavar="TOKENS", help="of a prompt; default 2000")
    parser.add_argument("--points", type=int, default=20, metavar="K", help="rounds of each fault; default 20")
    parser.add_argument("--per-fault", type=int, default=20, metavar="N", help="requests of a round with a fault; default 20")
    parser.add_argument(
        "--faults", type=partial(some_of, FAULTS), default=list(FAULTS), metavar="F,F,…", help=f"of {', '.join(FAULTS)}"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args, out = parser().parse_args(argv), Console(soft_wrap=True)
    cases = list(draw(args.config, args.requests, args.longest, random.Random(args.seed)))
    command = f"{sys.executable} -m pdmux_ray.serve.launch {args.config} --port {{port}} {' '.join(SETTINGS)}"
    with running(command, "") as server, Progress(len(args.faults) * args.points, Console(stderr=True)) as progress:
        pair = Pair(server.url)
        rounds = [play(pair, cases, Harm(UNDISTURBED), random.Random(args.seed))]
        out.print(f"{_line(rounds[0])}; {pair.counts()}")
        for fault in args.faults:
            for number in range(args.points):
                progress.update(len(rounds) - 1, fault)
                rng = random.Random(f"{args.seed} {fault} {number}")  # the same whatever the other faults are
                some = rng.sample(cases, min(args.per_fault, len(cases)))
                rounds.append(play(pair, some, _draw_harm(fault, rounds[0].took_s * len(some) / len(cases), rng), rng))
                out.print(_line(rounds[-1]))
        progress.update(len(rounds) - 1)
        out.print(f"transfers of the instances that there are now: {pair.counts()}")
    out.print("\n" + "\n".join(table(rounds)))
    return 0 if all(each.good for each in rounds) else 1


def _draw_harm(fault: str, usual_s: float, rng: random.Random) -> Harm:
    """`usual_s`: how long the round takes when nothing happens."""
    if fault == LEAVE:
        return Harm(fault, patience_s=usual_s / 2)
    return Harm(fault, rng.uniform(0.001, 0.8 * usual_s), rng.uniform(*FROZEN_S))


def _line(each: Round) -> str:
    count = each.verdicts.count
    what = f"{each.fault}: {each.took_s:.1f} s, {count('left')} left, {count('failed')} failed, {count('wrong')} wrong"
    return what + (f", {each.trouble}" if each.trouble else "")


def table(rounds: Sequence[Round]) -> list[str]:
    """A row for each fault."""
    rows = []
    for fault in dict.fromkeys(each.fault for each in rounds):
        ours = [each for each in rounds if each.fault == fault]
        verdicts = [verdict for each in ours for verdict in each.verdicts]
        counts = [verdicts.count(verdict) for verdict in ("left", "wrong", "failed")]
        after = [sum(each.leaked for each in ours), f"{max(each.longest_s for each in ours):.1f}"]
        rows.append([fault, len(ours), len(verdicts), *counts, *after, sum(each.trouble is not None for each in ours)])
    return markdown(_COLUMNS, rows)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


if __name__ == "__main__":
    sys.exit(main())
