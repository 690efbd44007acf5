"""A finished prefill joins the decodes by an event, not by luck: a device whose blocks are late gives the same tokens, and one
without the event does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tiny_models import VOCAB, save_tiny

from pdmux_ray.bench.correctness import CONTEXT, PAGE, Answers, ScheduleBench
from pdmux_ray.config import EngineConfig
from pdmux_ray.device.base import limit_spinning
from pdmux_ray.device.cpu.cores import usable_cores
from pdmux_ray.engine.runner import GiveUp, PrefillSlice, StepBatch, StepOutput, never
from pdmux_ray.types import ModelFacts, Split

limit_spinning()
from pdmux_ray.device.cpu.runner import CpuRunner  # noqa: E402

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(usable_cores() < 2, reason="two lanes need two cores"),
]

FACTS = ModelFacts(CONTEXT, VOCAB, frozenset({2}))
CONFIG = EngineConfig.model_validate({"device": "cpu", "mode": "split", "page_size": PAGE, "kv_cache_gib": 0.001, "threads": 2})
SCHEDULES = 60
PATIENCE = 3
KIND = "random split"  # each lane on a core of its own: nothing but the event orders them


class LateRunner(CpuRunner):
    """A block computes nothing until somebody waits for it, or has asked PATIENCE times whether it is done."""

    def __init__(self, model_dir: Path, config: EngineConfig) -> None:
        super().__init__(model_dir, config)
        self._may_begin, self._asked = threading.Event(), 0

    def launch_block(self, job_id: int, end_layer: int, split: Split) -> None:
        self._may_begin, self._asked = threading.Event(), 0
        self._ready_workers().prefill(split).submit(self._may_begin.wait)
        super().launch_block(job_id, end_layer, split)

    def block_done(self) -> bool:
        self._asked += 1
        if self._asked == PATIENCE:
            self._may_begin.set()
        return super().block_done()

    def collect_block(self) -> StepOutput | None:
        self._may_begin.set()
        return super().collect_block()


class HastyRunner(LateRunner):
    """The event is missing: it calls a block done as soon as it is launched, and answers with tokens it has been told before.
    The block computes when the lane or all units are needed again."""

    def __init__(self, model_dir: Path, config: EngineConfig) -> None:
        super().__init__(model_dir, config)
        self.told: Answers | None = None  # until then it is a `LateRunner`
        self._slices: dict[int, Sequence[PrefillSlice]] = {}
        self._newest = 0, 0  # job, and the layer to which its block goes

    def open_job(self, job_id: int, slices: Sequence[PrefillSlice]) -> None:
        self._catch_up()
        self._slices[job_id] = slices
        super().open_job(job_id, slices)

    def launch_block(self, job_id: int, end_layer: int, split: Split) -> None:
        self._catch_up()
        self._newest = job_id, end_layer
        super().launch_block(job_id, end_layer, split)

    def block_done(self) -> bool:
        return self.told is not None or super().block_done()

    def collect_block(self) -> StepOutput | None:
        if self.told is None:
            return super().collect_block()
        job_id, end_layer = self._newest
        if end_layer < self.layers:
            return None
        return StepOutput([self._token(self.told, piece) for piece in self._slices[job_id] if piece.sample])

    def launch(self, batch: StepBatch, give_up: GiveUp = never, split: Split | None = None) -> None:
        if split is None:
            self._catch_up()
        super().launch(batch, give_up, split)

    def drop_job(self, job_id: int) -> None:
        self._catch_up()
        super().drop_job(job_id)

    def close(self) -> None:
        self._catch_up()
        super().close()

    def _catch_up(self) -> None:
        if self._block is not None:
            super().collect_block()

    def _token(self, told: Answers, piece: PrefillSlice) -> int:
        """Of a request, the one that comes next; of one that has gone astray, any."""
        sequence = piece.sequence
        tokens = told.tokens[sequence.request_id]
        return tokens[min(len(sequence.tokens) - sequence.prompt_tokens, len(tokens) - 1)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def late(model_dir: Path) -> Iterator[LateRunner]:
    runner = LateRunner(model_dir, CONFIG)
    yield runner
    runner.close()


@pytest.fixture
def hasty(model_dir: Path) -> Iterator[HastyRunner]:
    runner = HastyRunner(model_dir, CONFIG)
    yield runner
    runner.close()


def test_blocks_that_are_late_change_no_token(late: LateRunner) -> None:
    found = ScheduleBench(late, FACTS).run(KIND, range(SCHEDULES))
    assert found.wrong == []
    assert set(found.modes) == {"split"}


def test_without_the_event_decodes_read_what_is_not_written_yet(hasty: HastyRunner) -> None:
    bench = ScheduleBench(hasty, FACTS)
    hasty.told = bench.expected
    found = bench.run(KIND, range(SCHEDULES))
    assert len(found.wrong) > SCHEDULES // 2
