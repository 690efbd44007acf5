"""SGLang's published rule for PD-multiplexing, to compare with: units by decode batch size, layers by a token budget.

Source: `multiplex/pdmux_context.py` and `multiplex/multiplexing_mixin.py` of SGLang 0.5.20 to 0.5.23. The rule looks at nothing
but the number of decodes: at no objective, context length, model or time.

groups   [all units prefill] [split 1, most for prefill] … [split n-2, most for decode] [all units decode]
choice   both phases: split by the number of decodes; one phase alone: all units

What is ours: a device with too few units for the published floor (`DECODE_FLOOR`) still gets groups, and fewer decodes than a
table's first threshold have its first split, where the published code fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from pdmux_ray.policy.decisions import ModeReason
from pdmux_ray.types import Split

SM_GROUP_NUM = 8
TOKEN_BUDGET = 65_536  # of a step's layers: tokens x layers
DECODE_BS_DIVISOR = 36
MIN_GROUP_NUM = 3
DECODE_FLOOR = 16  # units that an automatic split leaves to decode


class Grain(NamedTuple):
    """How finely a device can be divided."""

    min_units: int  # of a part
    unit_multiple: int  # a part has `min_units` and a multiple of this more


# Major compute capability -> its grain. The published code knows no other.
GRAINS: Mapping[int, Grain] = MappingProxyType({6: Grain(1, 1), 7: Grain(2, 2), 8: Grain(4, 2), 9: Grain(8, 8)})
CORES = Grain(1, 1)


class Division(NamedTuple):
    """A row of `manual_divisions`."""

    prefill_units: int
    decode_units: int
    decode_batch: int  # the split counts from so many decodes on


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """What the published YAML file says. `divisions`: empty for the automatic splits, else `sm_group_num` - 2 of them."""

    sm_group_num: int = SM_GROUP_NUM
    divisions: tuple[Division, ...] = ()
    token_budget: int = TOKEN_BUDGET
    decode_bs_divisor: int = DECODE_BS_DIVISOR


def divide(units: int, groups: int, min_units: int, unit_multiple: int) -> list[Split]:
    """At most `groups` splits, most for prefill first: prefill has at least half of the units and decode `DECODE_FLOOR`.

    Where that leaves no split at all (a CPU, say) decode has at least `min_units`: 2 cores make 1/1, and 4 make 3/1 and 2/2.
    Empty when the device cannot be divided.
    """
    prefills = [p for p in range(min_units, units - min_units + 1, unit_multiple) if 2 * p >= units]
    roomy = [p for p in prefills if units - p >= DECODE_FLOOR] or prefills
    if len(roomy) >= groups:
        roomy = roomy[:: max(1, len(roomy) // groups)][:groups]
    return [Split(p, units - p) for p in reversed(roomy)]


def group_table(units: int, splits: Sequence[Split]) -> list[Split]:
    """All groups as the published code numbers them: the splits between one for prefill alone and one for decode alone."""
    return [Split(units, 0), *splits, Split(0, units)]


def choose_group(groups: int, decode_batch: int, has_prefill: bool, decode_bs_divisor: int = DECODE_BS_DIVISOR) -> int:
    """The number of the group among `groups`, by the automatic choice."""
    if decode_batch and has_prefill:
        return max(1, min(groups - 2, decode_batch * (groups - 2) // decode_bs_divisor))
    return groups - 1 if decode_batch else 0


def layers_per_step(new_tokens: int, layers: int, token_budget: int = TOKEN_BUDGET) -> int:
    """Layers of a prefill of `new_tokens` that are launched beside one decode step, of a model of `layers`."""
    return min(layers, max(1, token_budget // new_tokens))


@dataclass(frozen=True, slots=True)
class PublishedRule:
    """The rule for one device. `splits`: at least one, most for prefill first. `thresholds`: from how many decodes on each of
    them counts, ascending; empty for the automatic choice."""

    splits: tuple[Split, ...]
    thresholds: tuple[int, ...] = ()
    token_budget: int = TOKEN_BUDGET
    decode_bs_divisor: int = DECODE_BS_DIVISOR

    @classmethod
    def of(cls, table: PublishedTable, units: int, grain: Grain) -> PublishedRule:
        """Raises ValueError when the table does not fit the device; `misfits` says which row and why."""
        if table.divisions:
            if wrong := misfits(table.divisions, units, grain):
                raise ValueError("; ".join(f"row {row + 1}: {why}" for row, why in wrong.items()))
            splits = [Split(division.prefill_units, division.decode_units) for division in table.divisions]
        elif not (splits := divide(units, table.sm_group_num - 2, *grain)):
            raise ValueError(f"{units} units cannot be divided into two parts of at least {grain.min_units}")
        thresholds = tuple(division.decode_batch for division in table.divisions)
        return cls(tuple(splits), thresholds, table.token_budget, table.decode_bs_divisor)

    @property
    def reason(self) -> ModeReason:
        return ModeReason.TABLE

    def split(self, decode_batch: int) -> Split:
        """Of a step that does both."""
        if self.thresholds:
            reached = sum(decode_batch >= threshold for threshold in self.thresholds)
            return self.splits[max(0, reached - 1)]
        return self.splits[choose_group(len(self.splits) + 2, max(1, decode_batch), True, self.decode_bs_divisor) - 1]

    def choose(self, decode_batch: int, new_tokens: int, layers: int) -> tuple[Split, int]:
        """The split of a step that does both, and how many of a model's `layers` a prefill of `new_tokens` runs in it."""
        return self.split(decode_batch), layers_per_step(new_tokens, layers, self.token_budget)


def misfits(divisions: Sequence[Division], units: int, grain: Grain) -> dict[int, str]:
    """Row -> why it does not fit a device of `units`, and what would. Decode gets what prefill's part leaves over, so only that
    part is aligned: 112/20 is right where parts are made in eights."""
    found = {}
    for row, (prefill, decode, _) in enumerate(divisions):
        if prefill + decode != units:
            found[row] = (
                f"{prefill} + {decode} is {prefill + decode}, but the device has {units} units; "
                f"beside {prefill} for prefill there are {units - prefill} for decode"
            )
        elif prefill not in (legal := range(grain.min_units, units - grain.min_units + 1, grain.unit_multiple)):
            near = sorted(sorted(legal, key=lambda possible: abs(possible - prefill))[:2])
            found[row] = (
                f"prefill cannot have {prefill} of {units} units: a part has at least {grain.min_units}, prefill's grows in "
                f"steps of {grain.unit_multiple}; near are {' and '.join(f'{n}/{units - n}' for n in near) or 'none'}"
            )
    return found
