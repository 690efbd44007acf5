"""Every fault that an instance which prefills, or one that decodes, can have, between two processes over NIXL; without Ray.

    python -m pdmux_ray.bench.faults [--model demo|tiny] [--points K] [--faults kill-prefill,partition,...] [--nodes]

At each point requests (random lengths, shared beginnings, seeds, penalties) come to an instance that decodes and has their KV
from one that prefills; pages are scarce at both, and some clients leave. At a random moment of that the fault happens. Then
every answer must be that of an instance alone, and within 10 s every page of both be free, and the KV of a new request come
from the other instance. That an instance is dead or silent must be noticed in time. Exit status 1 otherwise.

`partition`, and with --nodes everything, runs in two network namespaces with a link between them, each process on what looks
like a kernel of its own, KV by TCP. That needs root and the commands ip, tc and unshare; else it is reported as not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

from rich.console import Console

from pdmux_ray.bench.fault_instance import Instance, Nursery, Setup
from pdmux_ray.bench.fault_points import DECODE, FAULTS, PREFILL, TIMES, Case, Client, Clients, Pair, Point
from pdmux_ray.bench.handoffs import TOKEN_IDS, Verdict, draw_requests, markdown, some_of
from pdmux_ray.bench.namespaces import Namespaces, Side, why_not
from pdmux_ray.errors import PdmuxError
from pdmux_ray.model.source import resolve
from pdmux_ray.report.progress import Progress

UNDISTURBED = "undisturbed"
NEEDS_NODES = "partition"
WELL_S = 10.0  # within which all is as before
LONGEST = 2000  # tokens of a prompt
POOL_TOKENS = 2600  # of an instance: little more than the longest request
MUCH = 1.5  # pools that the requests of `no-pages` need
CASES = 48  # that points choose from: what one of them leaves in the cache is mostly gone when it is chosen again
LEAVING = {UNDISTURBED: 0.0, "leave-client": 0.7}  # share of the clients; with other faults:
LEAVE = 0.2
PROBE_TOKENS = 20
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 256,
    "hidden_act": "silu",
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_COLUMNS = (
    *("fault", "points", "requests", "left", "wrong", "failed", "leaked pages", "noticed within", "limit", "all well within"),
    *("not well", "transfers"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one point. `noticed`: seconds, and within which it was to be. `trouble`: after `WELL_S`, if there was any."""

    fault: str
    verdicts: tuple[Verdict, ...]
    noticed: tuple[tuple[float, float], ...]
    well_s: float
    leaked: int
    trouble: str | None
    transfers: Counter[str]

    @property
    def good(self) -> bool:
        in_time = all(took_s <= limit_s for took_s, limit_s in self.noticed)
        return in_time and self.trouble is None and not {"wrong", "failed"} & set(self.verdicts)


@dataclass(frozen=True, slots=True)
class Found:
    """`not_run`: faults, and why not."""

    outcomes: list[Outcome]
    not_run: dict[str, str]


@dataclass(frozen=True, slots=True)
class Model:
    directory: Path
    random_weights: bool

    @classmethod
    def named(cls, name: str, folder: Path) -> Model:
        """`tiny`: one with random weights, made in the folder."""
        if name != "tiny":
            return cls(resolve(name), random_weights=False)
        (folder / "config.json").write_text(json.dumps(TINY))
        return cls(folder, random_weights=True)

    def engine(self, side: Side) -> dict[str, Any]:
        """An EngineConfig. Who prefills hands over its KV a few layers at a time, and does not let many wait."""
        config = json.loads((self.directory / "config.json").read_text())
        layers, heads, size = (config[f] for f in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
        settings = {
            "device": "cpu",
            "threads": 1,
            "dtype": "bfloat16",
            "load": "dummy" if self.random_weights else "weights",
            "context_length": LONGEST + 48,
            "kv_cache_gib": POOL_TOKENS * layers * 2 * heads * size * 2 / 2**30,
            "mode": "chunked",
            "chunk_tokens": 64,
            "transfer": TIMES,
        }
        if side == PREFILL:
            settings |= {"mode": "time_shared", "multiplex": {"policy": "fixed", "block_layers": max(1, layers // 5)}}
            settings |= {"max_batch": 4, "max_waiting": 4}
        return settings


class FaultBench:
    """Where instances come from, and what they are asked. Close it."""

    def __init__(self, model: str, requests: int, longest: int, seed: int, folder: Path) -> None:
        self._clients = Clients()
        self._requests = requests
        self._seed = seed
        self._folder = folder
        self._model = Model.named(model, folder)
        self._s_per_token = [0.0]  # of undisturbed points
        self._asked = 0
        self._closing = contextlib.ExitStack()
        self._here = Nursery(folder, "here")
        self._closing.callback(self._here.close)
        self._alone = self._start([self._here], DECODE, name="alone", host="127.0.0.1")
        self._closing.callback(self._alone.kill)
        drawn = draw_requests(CASES, longest, random.Random(seed))
        self._cases = [Case(prompt, params, self._answer(prompt, params)) for prompt, params in drawn]

    @contextlib.contextmanager
    def pair(self, nodes: bool) -> Iterator[Pair]:
        """`nodes`: each in a network of its own."""
        with contextlib.ExitStack() as closing:
            network, nurseries = None, [self._here, self._here]
            if nodes:
                network = closing.enter_context(Namespaces())
                insides = [partial(network.inside, side) for side in (DECODE, PREFILL)]
                nurseries = [Nursery(self._folder, network.names[n], inside) for n, inside in enumerate(insides)]
                for nursery in nurseries:
                    closing.callback(nursery.close)
            pair = Pair(partial(self._start, nurseries), network)
            closing.callback(pair.close)
            self._until_well(pair)
            yield pair

    def try_once(self, pair: Pair, fault: str, number: int, points: int) -> Outcome:
        """One point. Its moment is one of `points` that are spread over the time which the requests take undisturbed."""
        rng = random.Random(f"{self._seed} {fault} {number}")
        cases = self._choose(fault, rng)
        tokens = sum(len(case.prompt) + len(case.tokens) for case in cases)
        span_s = fmean(self._s_per_token) * tokens
        point = Point(f"{fault} {number}", pair, self._clients, cases, rng)
        fault_s = span_s * (number + rng.random()) / points
        agenda = point.arrivals(span_s, fault_s, LEAVING.get(fault, LEAVE))
        if fault != UNDISTURBED:
            agenda += FAULTS[fault](point, fault_s)
        decode, before, began_s = pair.decode, _fetches(pair.decode), time.monotonic()
        verdicts = point.play(agenda)
        if fault == UNDISTURBED:
            self._s_per_token = [*filter(None, self._s_per_token), (time.monotonic() - began_s) / tokens]
        well_s, trouble = self._until_well(pair)
        after = _fetches(pair.decode)
        return Outcome(
            *(fault, verdicts, tuple(found() for found in point.noticed), well_s, pair.held_pages() if trouble else 0, trouble),
            after - before if pair.decode is decode else after,
        )

    def close(self) -> None:
        self._closing.close()

    def _until_well(self, pair: Pair) -> tuple[float, str | None]:
        """After how many seconds; or what is wrong then."""
        began_s = time.monotonic()
        while True:
            trouble = pair.trouble() or self._probe(pair)
            took_s = time.monotonic() - began_s
            if trouble is None or took_s > WELL_S:
                return took_s, trouble
            time.sleep(0.02)

    def _probe(self, pair: Pair) -> str | None:
        """Why the KV of a new request does not come from the other instance, or its answer is wrong."""
        self._asked += 1
        rng = random.Random(f"{self._seed} probe {self._asked}")
        prompt = [rng.randrange(*TOKEN_IDS) for _ in range(PROBE_TOKENS)]
        params = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
        case, before = Case(prompt, params, self._answer(prompt, params)), _fetches(pair.decode)
        point = Point(f"probe {self._asked}", pair, self._clients, [case], rng)
        (verdict,) = point.play(point.arrivals(0.0, 0.0, 0.0))
        if verdict != "right":
            return f"a request after it: {verdict}"
        found = _fetches(pair.decode) - before
        return None if found["landed"] else f"the KV of a request after it has not come: {_words(found)}"

    def _choose(self, fault: str, rng: random.Random) -> list[Case]:
        if fault != "no-pages":
            return rng.sample(self._cases, self._requests)
        cases: list[Case] = []
        for case in rng.sample(self._cases, len(self._cases)):
            if sum(len(each.prompt) for each in cases) < MUCH * POOL_TOKENS:
                cases.append(case)
        return cases

    def _answer(self, prompt: list[int], params: dict[str, Any]) -> list[int]:
        """Of an instance alone."""
        self._asked += 1
        name, client = f"alone {self._asked}", Client(Case(prompt, params, []))
        self._clients.add({name: client})
        self._alone.request(name, prompt, params, [], [])
        self._clients.wait([client])
        if not client.ended or client.error is not None:
            raise PdmuxError(f"an instance alone does not answer: {client.error or 'nothing came'}")
        return client.tokens

    def _start(self, nurseries: Sequence[Nursery], side: Side, **setup: Any) -> Instance:
        common = {"directory": str(self._model.directory), "engine": self._model.engine(side), "place": side}
        whole = Setup(**{**common, "port": 0, "compatible": "with each other", **setup})
        return nurseries[side].start(whole, self._clients.heard)


def _fetches(instance: Instance) -> Counter[str]:
    """Empty for one that does not work any more, which is told elsewhere."""
    with contextlib.suppress(PdmuxError):
        return Counter(instance.state()["fetches"])
    return Counter()


def _words(transfers: Counter[str]) -> str:
    return ", ".join(f"{reason} {number}" for reason, number in transfers.most_common() if number) or "none"


def line(outcome: Outcome) -> str:
    """What is wrong with it."""
    late = [f"noticed after {took_s:.3f} s, not {limit_s:g}" for took_s, limit_s in outcome.noticed if took_s > limit_s]
    bad = [f"{n} {verdict}" for verdict, n in Counter(outcome.verdicts).items() if verdict in ("wrong", "failed")]
    return ", ".join([*bad, *late, *([outcome.trouble] if outcome.trouble else [])])


def table(found: Found) -> list[str]:
    """A row for each fault. Beside what took longest to be noticed: how often it was to be."""
    rows: list[list[object]] = []
    for fault in dict.fromkeys(each.fault for each in found.outcomes):
        ours = [each for each in found.outcomes if each.fault == fault]
        verdicts = Counter(verdict for each in ours for verdict in each.verdicts)
        noticed = [pair for each in ours for pair in each.noticed]
        worst = f"{max(took_s for took_s, _ in noticed):.3f} s ({len(noticed)})" if noticed else ""
        rows.append([fault, len(ours), verdicts.total(), *(verdicts[name] for name in ("left", "wrong", "failed"))])
        limit = f"{noticed[0][1]:g} s" if noticed else ""
        rows[-1] += [sum(each.leaked for each in ours), worst, limit, f"{max(each.well_s for each in ours):.1f} s"]
        rows[-1] += [sum(each.trouble is not None for each in ours), _words(sum((o.transfers for o in ours), Counter()))]
    rows += [[fault, "not run", *[""] * (len(_COLUMNS) - 3), why] for fault, why in found.not_run.items()]
    return markdown(_COLUMNS, rows)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.faults", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo", help="demo, tiny (random weights) or a directory; default demo")
    parser.add_argument("--points", type=int, default=20, metavar="K", help="of each fault; default 20")
    parser.add_argument("--requests", type=int, default=4, metavar="N", help="of a point; default 4")
    parser.add_argument("--longest", type=int, default=LONGEST, metavar="TOKENS", help=f"of a prompt; default {LONGEST}")
    parser.add_argument(
        "--faults", type=partial(some_of, FAULTS), default=list(FAULTS), metavar="F,F,…", help=f"of {', '.join(FAULTS)}"
    )
    parser.add_argument("--nodes", action="store_true", help="each instance in a network namespace, with every fault")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _no_nodes() -> str | None:
    return why_not() or (None if shutil.which("unshare") else "no command unshare (util-linux)")


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # what was started is ended on the way out


def main(argv: Sequence[str] | None = None) -> int:
    args, out = parser().parse_args(argv), Console(soft_wrap=True)
    signal.signal(signal.SIGTERM, _end)
    found = Found([], {})
    try:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            bench = FaultBench(args.model, args.requests, args.longest, args.seed, Path(folder))
            with contextlib.closing(bench):
                _try_all(bench, [UNDISTURBED, *args.faults], args.points, args.nodes, found)
    finally:  # also of what was interrupted
        out.print("\n" + "\n".join(table(found)))
    return 0 if all(each.good for each in found.outcomes) else 1


def _try_all(bench: FaultBench, faults: Sequence[str], points: int, nodes: bool, found: Found) -> None:
    out = Console(soft_wrap=True)
    with Progress(len(faults) * points, Console(stderr=True)) as progress:
        for fault in faults:
            apart = nodes or fault == NEEDS_NODES
            if apart and (why := _no_nodes()) is not None:
                found.not_run[fault] = why
                continue
            with bench.pair(apart) as pair:
                for number in range(points):
                    found.outcomes.append(bench.try_once(pair, fault, number, points))
                    progress.update(len(found.outcomes), fault)
                    if not found.outcomes[-1].good:
                        out.print(f"{fault}, point {number}: {line(found.outcomes[-1])}")


if __name__ == "__main__":
    sys.exit(main())
