"""What the groups of the configuration are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# Of every group: nobody changes it, and an unknown key is an error. No base class: ruff knows pydantic's own alone, and would
# take a default such as {} for one that instances share.
FROZEN = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
