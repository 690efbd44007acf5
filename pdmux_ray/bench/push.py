"""`python -m pdmux_ray.bench.push`: how soon after its last layer the KV of a prompt is where it is decoded.

Two processes with an engine each, put together as instances are: one prefills random prompts and pushes each block while it
computes the next. By turns with that it holds everything back until the prefill is over and pushes the whole request at once.
Both are timed from when the engine that prefills has computed the last of it to when the engine that decodes is told that all
has landed; so each has what threads take to wake each other in it. A block is a chunk of tokens in all layers (mode chunked, as
in configs/1p1d.yaml) or all tokens in some layers (time_shared). Exit status 1: a share above the target.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console

from kv_transfer.api import Fetch, HandoffId, KvPort, Landed, PortEvent, Wanted
from kv_transfer.layout import KVLayout
from pdmux_ray.bench import paired
from pdmux_ray.config import EngineConfig, load_app_config
from pdmux_ray.device.base import build_runner
from pdmux_ray.device.cpu.cores import own_cores
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.errors import PdmuxError
from pdmux_ray.model.source import resolve
from pdmux_ray.report.progress import Progress
from pdmux_ray.serve.peers import Pooled, Who, open_peers
from pdmux_ray.types import Mode, ModelFacts, NewRequest, SamplingParams, TokenEvent

ROOT = Path(__file__).parents[2]
TARGET = 0.20
PATIENCE_S = 120.0
SWITCH_S = 0.0005  # as instances have it: how long a thread waits for Python's lock before it asks for it


@dataclass(frozen=True, slots=True)
class Job:
    """How both processes are set up."""

    model_dir: Path
    engine: EngineConfig
    tls: str  # UCX_TLS


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds from the last layer to the last byte landed, of each request: pushed block by block, and whole."""

    job: Job
    prompt: int
    bytes: int
    blocks: int
    tail_s: list[float]
    whole_s: list[float]

    @property
    def share(self) -> paired.Ratio:
        return paired.ratio(self.tail_s, self.whole_s)


class MarkedPort(KvPort):
    """The port of an engine that has one handoff at a time, with the times of what passes. `layout`: of the engine's pool.

    `whole`: as P, what has been computed is held back until it is all there. Owner: the engine's thread; others read and set
    between two handoffs.
    """

    def __init__(self, port: KvPort, layout: KVLayout) -> None:
        self.whole = False
        self.blocks = 0  # that P has computed of the last handoff
        self.computed_s = self.landed_s = math.nan
        self._port = port
        self._layout = layout
        self._wanted = 0  # tokens
        self._pages: dict[int, int] = {}  # number of the page in the prompt -> page of the pool

    @property
    def pages(self) -> int:
        """Of the last handoff that P has computed."""
        return len(self._pages)

    @property
    def epoch(self) -> int:
        return self._port.epoch

    def computed(self, handoff: HandoffId, layers: range, tokens: range, pages: Sequence[int]) -> None:
        now = time.monotonic()
        self.blocks += 1
        self._pages.update(enumerate(pages, tokens.start // self._layout.page_size))
        last = layers.stop == self._layout.layers and tokens.stop == self._wanted
        if last:
            self.computed_s = now
        if not self.whole:
            self._port.computed(handoff, layers, tokens, pages)
        elif last:
            everything = [self._pages[number] for number in sorted(self._pages)]
            self._port.computed(handoff, range(self._layout.layers), range(self._wanted), everything)

    def poll(self) -> Sequence[PortEvent]:
        events = self._port.poll()
        for event in events:
            if isinstance(event, Wanted):
                self._wanted, self._pages, self.blocks = len(event.tokens), {}, 0
            elif isinstance(event, Landed):
                self.landed_s = time.monotonic()
        return events

    def fetch(self, fetch: Fetch) -> None:
        self._port.fetch(fetch)

    def drop(self, handoff: HandoffId) -> None:
        self._port.drop(handoff)

    def failed(self, handoff: HandoffId) -> None:
        self._port.failed(handoff)

    def busy(self, seconds: float) -> None:
        self._port.busy(seconds)

    def wake_with(self, wake: Callable[[], None]) -> None:
        self._port.wake_with(wake)


class Side:
    """One of the two, in a process of its own. What another process may `ask` of it, see there."""

    def __init__(self, name: str, place: int, job: Job) -> None:
        os.environ["UCX_TLS"] = job.tls
        with own_cores(place, job.engine.threads):
            runner = build_runner(job.model_dir, job.engine)
        from pdmux_ray.model.config import DecoderConfig  # after the runner, which sets up the process before torch is there

        model = DecoderConfig.from_pretrained(job.model_dir)
        facts = ModelFacts(model.context_length, model.vocab_size, frozenset())
        self._vocab_size = model.vocab_size
        self._peers = open_peers(Who(name, "127.0.0.1", str(job.model_dir), "bench"), runner, facts, job.engine.transfer)
        assert isinstance(runner, Pooled)  # or it has no peers
        self._layout = runner.layout
        self._port = MarkedPort(self._peers.port, runner.layout)
        self._events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        limits = resolve_limits(job.engine, facts, runner)
        self._engine = Engine(runner, limits, self._publish, port=self._port)
        sys.setswitchinterval(SWITCH_S)
        self._engine.start()

    def address(self) -> str:
        return self._peers.address

    def meet(self, peer: str, address: str) -> None:
        """Returns when the peer is linked."""
        self._peers.meet({peer: address})
        deadline = time.monotonic() + PATIENCE_S
        while self._peers.linked() != [peer]:
            if time.monotonic() > deadline:
                raise PdmuxError(f"no link to {peer} within {PATIENCE_S:g} s: run it again")
            time.sleep(0.01)

    def hold(self, whole: bool) -> None:
        self._port.whole = whole

    def fetch(self, peer: str, tokens: int, number: int) -> float:
        """The KV of a random prompt; when it was here, in seconds of the machine's monotonic clock."""
        rng = random.Random(number)
        prompt = tuple(rng.randrange(self._vocab_size) for _ in range(tokens))
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        due_s = time.monotonic() + PATIENCE_S
        self._port.landed_s = math.nan
        self._engine.submit(NewRequest(str(number), prompt, params, prefill_peers=(peer,), fetch_deadline_s=due_s))
        with contextlib.suppress(queue.Empty):
            self._events.get(timeout=PATIENCE_S)
        if math.isnan(self._port.landed_s):
            raise PdmuxError(f"KV of {tokens} tokens did not come: {dict(self._engine.counters.fetches)}")
        return self._port.landed_s

    def computed(self) -> tuple[float, int, int]:
        """Of the last handoff: when all of it was, in how many blocks, and the bytes of its pages."""
        port, layout = self._port, self._layout
        return port.computed_s, port.blocks, port.pages * 2 * layout.layers * layout.page_bytes

    def close(self) -> None:
        self._peers.close(0.0)
        self._engine.close()

    def _publish(self, sink: str, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self._events.put(event)


def be_side(other: Connection, name: str, place: int, job: Job) -> None:
    """The process of a side: does what it is asked until it is told to close."""
    side = Side(name, place, job)
    what = ""
    while what != "close":
        what, arguments = other.recv()
        other.send(getattr(side, what)(*arguments))


class Remote:
    """A side in another process. Close it."""

    def __init__(self, name: str, place: int, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, child = context.Pipe()
        self._process = context.Process(target=be_side, args=(child, name, place, job), daemon=True)
        self._process.start()
        child.close()

    def ask(self, what: str, *arguments: Any) -> Any:
        """Raises PdmuxError when it has died; why, it has said on stderr."""
        try:
            self._line.send((what, arguments))
            return self._line.recv()
        except (EOFError, OSError) as error:
            raise PdmuxError(f"a process of the measurement has died when it was asked to {what}") from error

    def close(self) -> None:
        with contextlib.suppress(PdmuxError):
            self.ask("close")
        self._process.join(PATIENCE_S)


class Pair:
    """The one that prefills and the one that decodes, linked."""

    def __init__(self, job: Job) -> None:
        with contextlib.ExitStack() as started:
            self._prefill, self._decode = (Remote(name, place, job) for place, name in enumerate(("prefill", "decode")))
            started.callback(self.close)
            self._decode.ask("meet", "prefill", self._prefill.ask("address"))
            started.pop_all()
        self._number = 0

    def seconds(self, tokens: int, whole: bool) -> tuple[float, int, int]:
        """From the last layer to the last byte, of a prompt that nobody has seen; its blocks, and its bytes."""
        self._number += 1
        self._prefill.ask("hold", whole)
        landed_s = self._decode.ask("fetch", "prefill", tokens, self._number)
        computed_s, blocks, size = self._prefill.ask("computed")
        return landed_s - computed_s, blocks, size

    def close(self) -> None:
        self._decode.close()
        self._prefill.close()


@contextlib.contextmanager
def pair_of(job: Job) -> Iterator[Pair]:
    pair = Pair(job)
    try:
        yield pair
    finally:
        pair.close()


def measure(pair: Pair, job: Job, tokens: int, repeats: int, step: Callable[[], None]) -> Row:
    """`step` is called after each pair. The first pair does not count."""
    tail_s, whole_s = list[float](), list[float]()
    blocks = size = 0
    for number in range(repeats + 1):
        for whole in (False, True) if number % 2 else (True, False):
            seconds, found, size = pair.seconds(tokens, whole)
            blocks = blocks if whole else found
            if number:
                (whole_s if whole else tail_s).append(seconds)
        step()
    return Row(job, tokens, size, blocks, tail_s, whole_s)


def jobs(options: argparse.Namespace) -> list[Job]:
    """Raises ConfigError."""
    config = load_app_config(options.config)
    model_dir = options.model or resolve(config.model, weights=config.engine.reads_weights)
    found = []
    for mode in options.modes:
        changed: dict[str, Any] = {"mode": mode, "multiplex": {"policy": "fixed", "block_layers": options.block_layers}}
        if options.checksum is not None:
            changed["transfer"] = config.engine.transfer.model_dump() | {"checksum": options.checksum}
        engine = EngineConfig.model_validate(config.engine.model_dump() | changed)
        found += [Job(model_dir, engine, tls) for tls in options.tls]
    return found


def print_table(rows: Sequence[Row]) -> None:
    print(f"{'UCX_TLS':<14}{'mode':<14}{'prompt':>7}{'MB':>8}{'blocks':>8}{'whole ms':>10}{'tail ms':>9}  share")
    for row in rows:
        whole_ms, tail_ms = statistics.median(row.whole_s) * 1e3, statistics.median(row.tail_s) * 1e3
        print(
            f"{row.job.tls:<14}{row.job.engine.mode.value:<14}{row.prompt:>7}{row.bytes / 1e6:>8.2f}{row.blocks:>8}"
            f"{whole_ms:>10.2f}{tail_ms:>9.2f}  {row.share}",
            flush=True,
        )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdmux_ray.bench.push", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--config", type=Path, default=ROOT / "configs" / "1p1d.yaml", help="of both; default configs/1p1d.yaml"
    )
    parser.add_argument("--model", type=Path, help="a directory instead of the config's model")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 1024, 2048], metavar="TOKENS")
    parser.add_argument("--modes", type=Mode, nargs="+", default=[Mode.CHUNKED, Mode.TIME_SHARED], metavar="MODE")
    parser.add_argument("--block-layers", type=int, default=1, metavar="N", help="of a block in modes with lanes")
    parser.add_argument("--tls", nargs="+", default=["tcp,sm,self", "tcp,self"], help="UCX_TLS of both processes")
    parser.add_argument(
        "--checksum", action=argparse.BooleanOptionalAction, help="of what lands; default: as the config has it"
    )
    parser.add_argument("--repeats", type=int, default=7, help="pairs of each case")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    cases, rows, done = jobs(options), list[Row](), 0
    with Progress(len(cases) * sum(options.prompts) * (options.repeats + 1), Console(stderr=True)) as progress:
        for job in cases:
            with pair_of(job) as pair:
                for tokens in options.prompts:

                    def step(tokens: int = tokens, job: Job = job) -> None:
                        nonlocal done
                        done += tokens
                        progress.update(done, f"{job.tls}, {job.engine.mode.value}, {tokens} tokens")

                    rows.append(measure(pair, job, tokens, options.repeats, step))
    print_table(rows)
    high = [row for row in rows if row.share.median > TARGET]
    print(f"share: of the time of a whole request, median of {options.repeats} pairs [95 %]; target: at most {TARGET:.0%}")
    if high:
        print(f"{len(high)} of {len(rows)} rows are above {TARGET:.0%}")
    return 1 if high else 0


if __name__ == "__main__":
    sys.exit(main())
