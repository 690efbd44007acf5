"""The trials of `pdmux tune`, in processes of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass

from pdmux_ray.bench.simulated_runs import only_errors, simulating
from pdmux_ray.errors import PdmuxError
from pdmux_ray.tune.search import Done, Job, Submit
from pdmux_ray.tune.trial import Found, Setting, Trials


class WorkerLostError(PdmuxError):
    """A process of the search is gone, and its trial with it; the message says what may help."""


@dataclass(slots=True)
class Judges:
    """Candidates are chosen by the trials of one setting, and confirmed by those of another one."""

    chosen_by: Trials
    confirmed_by: Trials

    @classmethod
    def of(cls, chosen_by: Setting, confirmed_by: Setting) -> Judges:
        return cls(Trials(chosen_by), Trials(confirmed_by))

    def __call__(self, job: Job) -> Found:
        """Of all requests where the figures are told, so that all that are compared had the same. Raises ConfigError."""
        if job.fresh:
            return self.confirmed_by.run(job.candidate, job.rate, job.changes)
        return self.chosen_by.judge(job.candidate, job.rate, job.changes)


@contextmanager
def workers(chosen_by: Setting, confirmed_by: Setting, count: int) -> Iterator[Submit]:
    """With one, trials run in this process. The others end with the block. What a trial raises comes from its `result`;
    WorkerLostError from the block."""
    if count == 1:
        judges = Judges.of(chosen_by, confirmed_by)
        with only_errors():
            yield lambda job: Done(judges(job))
        return
    try:
        with simulating(count, _begin, chosen_by, confirmed_by) as pool:
            yield lambda job: pool.submit(_judged, job)
    except BrokenProcessPool:
        raise WorkerLostError(
            f"one of the {count} processes that simulate was ended from outside, perhaps by the system for want of memory. Try "
            "fewer --workers, or shorter runs (--requests)."
        ) from None


_judges: Judges  # of a process of the pool


def _begin(chosen_by: Setting, confirmed_by: Setting) -> None:
    """In a process of the pool."""
    global _judges
    _judges = Judges.of(chosen_by, confirmed_by)
    logging.getLogger("pdmux_ray").setLevel(logging.ERROR)


def _judged(job: Job) -> Found:
    return _judges(job)
