"""How the panels ask: PromQL over one metric, of what the reader has chosen."""

from __future__ import annotations

from pdmux_ray.metrics.dashboards.panel import Query

APP = 'app=~"$app", model=~"$model"'
INSTANCE = f'{APP}, instance=~"$instance"'
ROLE = f'{APP}, role=~"$role"'
WINDOW = "$__rate_interval"


def of(name: str, *more: str, where: str = INSTANCE) -> str:
    """The series of a metric or rule; `more`: further matchers."""
    return f"{name}{{{', '.join((where, *more))}}}"


def rate(name: str, *more: str, by: str = "", where: str = INSTANCE) -> str:
    """A second, of a counter, summed."""
    return f"{_sum(by)}(rate({of(name, *more, where=where)}[{WINDOW}]))"


def total(name: str, *more: str, by: str = "", where: str = INSTANCE) -> str:
    """Of a gauge, summed."""
    return f"{_sum(by)}({of(name, *more, where=where)})"


def quantile(q: float, name: str, *more: str, by: str = "", where: str = INSTANCE) -> str:
    """Of a histogram, of what was observed lately."""
    return f"histogram_quantile({q:g}, {rate(f'{name}_bucket', *more, by=', '.join(filter(None, ('le', by))), where=where)})"


def mean(name: str, *more: str, by: str = "", where: str = INSTANCE) -> str:
    """Of a histogram, of what was observed lately: exact."""
    upper, lower = (rate(f"{name}_{part}", *more, by=by, where=where) for part in ("sum", "count"))
    return f"{upper} / {lower}"


def share(part: str, *whole: str, by: str = "", where: str = INSTANCE) -> str:
    """Of the counter `part` in the sum of the counters `whole`."""
    rates = " + ".join(rate(name, by=by, where=where) for name in whole)
    return f"{rate(part, by=by, where=where)} / ({rates})"


def rates_by(name: str, label: str, where: str = INSTANCE) -> tuple[Query]:
    """A counter, one series for each value of a label."""
    return (Query(rate(name, by=label, where=where), f"{{{{{label}}}}}"),)


def _sum(by: str) -> str:
    return f"sum by ({by}) " if by else "sum"
