"""The variables of every dashboard, and how a query that names them becomes PromQL. Grafana does this by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice that the reader has: values of the label of that name, one or several; in a query a regular expression."""

    name: str
    label: str
    series: str  # PromQL whose series have the values, those alone that go with the choices before
    computed: bool = False  # whether that is more than a selector


# In this order: each narrows those that follow. An instance has a role when it had it at any time that is looked at.
VARIABLES = (
    Variable("app", "Application", "pdmux_role"),
    Variable("model", "Model", 'pdmux_role{app=~"$app"}'),
    Variable("role", "Role", 'pdmux_role{app=~"$app", model=~"$model"}'),
    Variable(
        "instance",
        "Instance",
        'max_over_time(pdmux_role{app=~"$app", model=~"$model", role=~"$role"}[$__range]) == 1',
        computed=True,
    ),
)


def filled(expr: str, values: Mapping[str, str]) -> str:
    """The query with each `$name` replaced, as it must be written in a PromQL string. Raises KeyError without its value."""
    return re.sub(r"\$(\w+)", lambda match: values[match[1]].replace("\\", r"\\").replace('"', r"\""), expr)
