"""Answers of a real model are those of one instance alone, while the placement controller gives instances other roles.

    python -m pdmux_ray.bench.placement_answers --profile FILE [--config configs/1p1d.yaml] [--rounds N]

Three instances of that config, of which two prefill at first. Short prompts with long answers come, then long prompts with
short answers; the controller's thresholds are so low that it follows the turn. An engine in this process has said what each
answer must be. Exit status 1 when an answer differs, a request fails, or no role has changed. `pdmux profile` of the config
makes the profile: of one instance, with the threads that each gets.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from pdmux_ray.bench.handoffs import ROOT, TOKEN_IDS, Case, Pair
from pdmux_ray.bench.placement import Watch
from pdmux_ray.bench.server import running
from pdmux_ray.config import load_serve_config
from pdmux_ray.generate import Generator
from pdmux_ray.types import SamplingParams

AT_ONCE = 12
KINDS = {"long answers": (40, 96), "long prompts": (600, 4)}  # tokens: of a prompt, of an answer
SETTINGS = (
    *("topology.prefill=2", "topology.mux=0", "topology.decode=1", "cpus_per_instance=0"),
    *("gateway.routing.policy=remote", "gateway.discovery_period_s=1"),
    *("engine.kv_cache_gib=0.1", "engine.prefix_cache=false", "engine.multiplex.itl_s=0.5"),
    *("placement.enabled=true", "placement.busy=0.05", "placement.confirm_s=1", "placement.cool_down_s=3"),
)


def draw(config: Path, settings: Sequence[str], rng: random.Random) -> Iterator[tuple[str, list[Case]]]:
    """Of each kind as many as come at once, with the answers of an engine in this process."""
    _, app = load_serve_config(config, settings)
    with Generator(app) as generator:
        for kind, (prompt_tokens, answer_tokens) in KINDS.items():
            prompts = [[rng.randrange(*TOKEN_IDS) for _ in range(prompt_tokens)] for _ in range(AT_ONCE)]
            params: dict[str, Any] = {"max_tokens": answer_tokens, "temperature": 1.0, "seed": rng.randrange(2**31)}
            params["ignore_eos"] = True
            answers = generator.generate(prompts, SamplingParams(**params))
            yield (
                kind,
                [
                    Case(prompt, params, answer.text, answer.finish.value if answer.finish else "")
                    for prompt, answer in zip(prompts, answers, strict=True)
                ],
            )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pdmux_ray.bench.placement_answers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "1p1d.yaml", help="default: configs/1p1d.yaml")
    parser.add_argument("--profile", type=Path, required=True, metavar="FILE", help="of that config")
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help=f"of {AT_ONCE} requests of each kind; default 6")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    settings = [*SETTINGS, f"engine.multiplex.profile={args.profile.absolute()}"]
    cases = dict(draw(args.config, settings, random.Random(args.seed)))
    sets = " ".join(f"--set {setting}" for setting in settings)
    found: Counter[str] = Counter()
    with running(f"{sys.executable} -m pdmux_ray.serve.launch {args.config} --port {{port}} {sets}", "") as server:
        pair, watch = Pair(server.url), Watch(server.url)
        watch.start()
        with ThreadPoolExecutor(AT_ONCE) as clients:
            for kind, asked in cases.items():
                for number in range(args.rounds):
                    verdicts = [verdict for verdict, _ in clients.map(lambda case: pair.answer(case, None), asked)]
                    found.update(verdicts)
                    counts = [prefill for _, prefill, _ in watch.samples]
                    print(f"{kind}, round {number + 1}: {dict(Counter(verdicts))}; {counts[-1]} instances prefill", flush=True)
        watch.end()
    counts = [prefill for _, prefill, _ in watch.samples]
    changes = sum(before != after for before, after in pairwise(counts))
    print(f"{found['right']} of {found.total()} answers are right; the ratio changed {changes} times")
    return 0 if found["right"] == found.total() and changes else 1


if __name__ == "__main__":
    sys.exit(main())
