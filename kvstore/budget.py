"""PURE. KV bytes of one owner on each tier against its ceilings, before anything is computed."""

from collections.abc import Mapping
from dataclasses import dataclass

from .geometry import Geometry, Tier


@dataclass(frozen=True, slots=True)
class Refusal:
    """The first ceiling that would be passed. Both numbers in bytes."""

    name: str
    """device_bytes, host_bytes or storage_bytes."""
    limit: int
    requested: int


def need(geometry: Geometry, sequence_tokens: int) -> dict[Tier, int]:
    """Bytes that a sequence of that length takes at most: the device holds its last, partly filled page too; the lower
    tiers get only what can be kept."""
    kept = geometry.bytes(geometry.kept_tokens(sequence_tokens))
    return {Tier.DEVICE: geometry.bytes(sequence_tokens), Tier.HOST: kept, Tier.STORAGE: kept}


def check(geometry: Geometry, sequence_tokens: int, limits: Mapping[Tier, int | None]) -> Refusal | None:
    """None where it fits. A tier without a limit, or with None, has no ceiling."""
    for tier, requested in need(geometry, sequence_tokens).items():
        limit = limits.get(tier)
        if limit is not None and requested > limit:
            return Refusal(f"{tier}_bytes", limit, requested)
    return None
