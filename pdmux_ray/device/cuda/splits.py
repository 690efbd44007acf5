"""Which two parts the SMs of a device can be divided into. Pure: the driver says the numbers, the driver makes the parts.

A split has a *group*, whose SMs are a multiple of the alignment, and the rest, which has no alignment. Decode is the group
where it can be: 108/24 (prefill/decode) of 132 SMs that are grouped in eights. Else prefill is, as in SGLang's tables: 112/20.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdmux_ray.errors import ConfigError
from pdmux_ray.types import Split

DECODE_EIGHTHS = (1, 2, 3, 4, 5, 6)  # of the SMs, about, in the table that is made when nobody asks for another


@dataclass(frozen=True, slots=True)
class SmResource:
    """SMs that can be divided, as the driver states them. All at least 1."""

    count: int
    minimum: int  # of a part
    alignment: int  # a group has a multiple of it


def feasible_splits(resource: SmResource, asked: Sequence[tuple[int, int]] | None = None) -> tuple[Split, ...]:
    """The disjoint splits to make, fewest decode units first.

    `asked`: (prefill_units, decode_units) of each. None: decode gets about as many SMs as `DECODE_EIGHTHS` says, as a group;
    empty when the device cannot be divided. Raises ConfigError when one that is asked for is not feasible.
    """
    possible = possible_splits(resource)
    if asked is None:
        grouped = [split for split in possible if decode_is_group(resource, split)]
        wanted = [resource.count * eighths / 8 for eighths in DECODE_EIGHTHS] if grouped else []
        splits = {min(grouped, key=lambda split: abs(split.decode_units - units)) for units in wanted}
    else:
        splits = {Split(prefill, decode) for prefill, decode in asked}
        if wrong := splits - set(possible):
            raise infeasible(resource, wrong)
    return tuple(_ordered(splits))


def possible_splits(resource: SmResource) -> list[Split]:
    """Every feasible one, fewest decode units first."""
    total, least = resource.count, resource.minimum
    splits = [Split(total - decode, decode) for decode in range(least, total - least + 1)]
    return [split for split in splits if decode_is_group(resource, split) or not split.prefill_units % resource.alignment]


def decode_is_group(resource: SmResource, split: Split) -> bool:
    """Else prefill is, and decode gets the rest."""
    return not split.decode_units % resource.alignment


def infeasible(resource: SmResource, splits: Iterable[Split], why: str = "") -> ConfigError:
    """The error that lists the feasible ones. `why`: what the driver said."""
    why = why or (
        f"the parts add up to all SMs, neither has fewer than {resource.minimum}, and one is a multiple of {resource.alignment}"
    )
    return ConfigError(
        f"engine.cuda.splits: {written(splits)} (prefill/decode) cannot be made of {resource.count} SMs: {why}. "
        f"Feasible here: {written(possible_splits(resource)) or 'none'}."
    )


def _ordered(splits: Iterable[Split]) -> list[Split]:
    return sorted(splits, key=lambda split: (split.decode_units, split.prefill_units))


def written(splits: Iterable[Split]) -> str:
    """As prefill/decode."""
    return ", ".join(f"{split.prefill_units}/{split.decode_units}" for split in _ordered(splits))
