"""Whatever shares the device with a request, and however its units are split, it gets the tokens of prefill_first.

    python -m pdmux_ray.bench.correctness [--model DIR] [--schedules N]

A schedule is drawn: two to five requests (shared beginnings, greedy and drawn tokens, short and long answers), the steps at
which they come, who is aborted, and a pool so small that some are preempted. Every kind below plays the same schedules. The
random kinds draw the split, who decodes, who starts, who rests and who is preempted for every step anew; in the others the
policy plans. Exit status 1 when a token or an end differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pdmux_ray.bench.random_planner import MODES, RandomPlanner
from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import build_runner
from pdmux_ray.engine.engine import Engine
from pdmux_ray.engine.fake_runner import linear_costs
from pdmux_ray.engine.lanes import Planner
from pdmux_ray.engine.limits import resolve_limits
from pdmux_ray.errors import PdmuxError
from pdmux_ray.model.source import resolve
from pdmux_ray.policy.views import CostModel
from pdmux_ray.text.tokenizer import Tokenizer
from pdmux_ray.types import FinishReason, Mode, ModelFacts, NewRequest, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from pdmux_ray.device.cpu.runner import CpuRunner  # which loads torch: `build_runner` sets up the process before that

PAGE = 4
PAGES = (16, 48)  # of a schedule's pool: a request alone fits into the fewest
ROOMY = 400  # pages with which nobody is preempted
REQUESTS = 60  # of which the schedules are drawn
MAX_BATCH = 6
CONTEXT = 60  # tokens; the longest request has fewer
SHOWN = 5  # differences that are told

Schedule = dict[int, list[NewRequest | str]]  # step -> who comes, and the ids of those who are aborted


@dataclass(frozen=True, slots=True)
class Kind:
    """How schedules are played: `drawn` are the modes that a random planner draws from; empty: the policy of `mode` plans."""

    mode: Mode
    drawn: tuple[Mode, ...] = ()


KINDS = {
    "random modes": Kind(Mode.AUTO, MODES),
    "random split": Kind(Mode.SPLIT, (Mode.SPLIT,)),
    "random capped": Kind(Mode.CAPPED, (Mode.CAPPED,)),
    "random time_shared": Kind(Mode.TIME_SHARED, (Mode.TIME_SHARED,)),
    **{mode.value: Kind(mode) for mode in (Mode.AUTO, Mode.SPLIT, Mode.CAPPED, Mode.TIME_SHARED, Mode.CHUNKED)},
}


@dataclass(slots=True)
class Answers:
    """A sink: the tokens and the end of each request, and what the engine did for them."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, FinishReason] = field(default_factory=dict)
    steps: int = 0
    preemptions: int = 0
    modes: Mapping[str, int] = field(default_factory=dict)
    took_s: float = 0.0

    def __call__(self, sink: str, events: list[TokenEvent]) -> None:
        for event in events:
            if event.request_id in self.ends:
                raise PdmuxError(f"request {event.request_id} has news after its end: {event}")
            tokens = self.tokens.setdefault(event.request_id, [])
            if event.token is not None:
                tokens.append(event.token)
            if event.finish is not None:
                self.ends[event.request_id] = event.finish

    def differs(self, name: str, other: Answers) -> bool:
        """Whether this request got other tokens than there, or another end. An aborted one may have got fewer."""
        tokens, expected = self.tokens[name], other.tokens[name]
        if self.ends.get(name) is FinishReason.ABORT:
            return tokens != expected[: len(tokens)]
        return (tokens, self.ends.get(name)) != (expected, other.ends[name])


@dataclass(slots=True)
class Found:
    """Of one kind."""

    kind: str
    schedules: int = 0
    requests: int = 0
    tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    modes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # which request of which schedule

    def add(self, seed: int, got: Answers, expected: Answers) -> None:
        self.schedules += 1
        self.requests += len(got.tokens)
        self.tokens += sum(map(len, got.tokens.values()))
        self.steps += got.steps
        self.preemptions += got.preemptions
        self.modes.update(got.modes)
        self.wrong += [f"{name} of schedule {seed}" for name in got.tokens if got.differs(name, expected)]


class ScheduleBench:
    """Plays schedules on one device, which outlives their engines: what a schedule leaves in the pages stays there."""

    def __init__(self, device: CpuRunner, facts: ModelFacts) -> None:
        self._device = device
        self._facts = replace(facts, context_length=CONTEXT)
        self.requests = draw_requests(random.Random(0), REQUESTS, facts.vocab_size)
        self.expected = self.play(Mode.PREFILL_FIRST, ROOMY, {0: list(self.requests)})
        self._step_s = self.expected.took_s / self.expected.steps
        self._costs = linear_costs(self._step_s, self._step_s / 10, device.layers, device.units)

    def run(self, kind: str, seeds: Iterable[int]) -> Found:
        """The schedules of these seeds, each compared with what prefill_first gave its requests."""
        found, how = Found(kind), KINDS[kind]
        for seed in seeds:
            rng = random.Random(seed)
            planner = RandomPlanner(seed, MAX_BATCH, how.drawn, self._device.most_steps) if how.drawn else None
            got = self.play(how.mode, rng.randrange(*PAGES), draw_schedule(rng, self.requests), self._costs, planner)
            found.add(seed, got, self.expected)
        return found

    def play(
        self,
        mode: Mode,
        pages: int,
        schedule: Schedule,
        costs: CostModel | None = None,
        planner: Planner | None = None,
    ) -> Answers:
        """One schedule to its end. Raises PdmuxError when it leaves anything behind."""
        config = {
            "device": "cpu",
            "mode": mode,
            "multiplex": {"itl_s": 2 * self._step_s, "ttft_s": 10 * self._step_s} if costs else {"itl_s": 1.0, "ttft_s": 1.0},
            "max_prefill_tokens": 64,
            "chunk_tokens": 9,
            "max_batch": MAX_BATCH,
        }
        answers, begin_s = Answers(), time.perf_counter()
        self._device.pages = pages
        limits = resolve_limits(EngineConfig.model_validate(config), self._facts, self._device)
        engine = Engine(self._device, limits, answers, costs=costs, planner=planner)  # never closed: that closes the device
        for step in range(max(schedule) + 1):
            for new in schedule.get(step, ()):
                engine.abort([new]) if isinstance(new, str) else engine.submit(new)
            engine.step()
        while engine.step():
            pass
        engine.check_integrity()
        load = engine.load()
        if (load.running, load.waiting, load.free_pages) != (0, 0, pages):
            raise PdmuxError(f"requests or pages are left when all have ended: {load}")
        counters = engine.counters
        answers.steps, answers.preemptions = counters.steps, counters.preemptions
        answers.modes = {mode.value: count for mode, count in counters.steps_by_mode.items() if count}
        answers.took_s = time.perf_counter() - begin_s
        return answers


def draw_requests(rng: random.Random, count: int, vocab_size: int) -> list[NewRequest]:
    """Many share a beginning; greedy and drawn tokens; short and long answers."""
    stems = [[rng.randrange(3, vocab_size) for _ in range(30)] for _ in range(3)]
    requests = []
    for index in range(count):
        stem, tail = rng.choice(stems), rng.randrange(0, 8)
        prompt = stem[: rng.randrange(1, len(stem))] + [rng.randrange(3, vocab_size) for _ in range(tail)]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 9),
            temperature=rng.choice([0.0, 1.2]),
            seed=rng.randrange(3),
            ignore_eos=rng.random() < 0.5,
            repetition_penalty=rng.choice([1.0, 1.3]),
        )
        requests.append(NewRequest(f"r{index}", tuple(prompt), params))
    return requests


def draw_schedule(rng: random.Random, requests: Sequence[NewRequest]) -> Schedule:
    """2 to 5 of the requests, each submitted at one of the first 12 steps; every fifth is aborted soon after."""
    schedule: Schedule = {}
    for new in rng.sample(requests, rng.randrange(2, 6)):
        step = rng.randrange(12)
        schedule.setdefault(step, []).append(new)
        if rng.random() < 0.2:
            schedule.setdefault(step + rng.randrange(1, 12), []).append(new.request_id)
    return schedule


def table(rows: Iterable[Found]) -> list[str]:
    """Lines in Markdown, a row for each kind."""
    lines = [
        "| how units are shared | schedules | requests | tokens | steps | preempted | of its steps | differ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in rows:
        shares = ", ".join(f"{mode} {count / sum(found.modes.values()):.0%}" for mode, count in found.modes.most_common())
        figures = (found.schedules, found.requests, found.tokens, found.steps, found.preemptions)
        lines.append(f"| {found.kind} | {' | '.join(map(str, figures))} | {shares or 'one pass'} | {len(found.wrong)} |")
    return lines


def main() -> int:
    """0; 1 when a request got other tokens than `prefill_first` gives it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo", help='its directory, or "demo"')
    parser.add_argument("--schedules", type=int, default=500, metavar="N", help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    config = EngineConfig.model_validate({"device": "cpu", "mode": "auto", "page_size": PAGE, "kv_cache_gib": 0.05})
    model_dir = resolve(args.model, config.reads_weights)
    device: CpuRunner = build_runner(model_dir, config)  # type: ignore[assignment]  # which `config` names
    try:
        bench = ScheduleBench(device, Tokenizer.load(model_dir).facts)
        rows = []
        for kind in args.kinds:
            rows.append(bench.run(kind, range(args.schedules)))
            print(f"{kind}: {len(rows[-1].wrong)} of {rows[-1].requests} requests differ", file=sys.stderr, flush=True)
    finally:
        device.close()
    print("\n".join(table(rows)))
    for found in rows:
        for which in found.wrong[:SHOWN]:
            print(f"{found.kind}: {which} differs from prefill_first")
    return int(any(found.wrong for found in rows))


if __name__ == "__main__":
    sys.exit(main())
