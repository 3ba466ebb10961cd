"""Where a mixer stands in its model."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A layer in its model: model width, index (from 0), number of layers, longest training sequence."""

    hidden: int
    index: int = 0
    depth: int = 1
    max_length: int = 2048
