"""lingvo optimizers that are correct on weights that a layout cuts into slices."""

from pipemesh.layers.optimizers.adafactor import Adafactor
from pipemesh.layers.optimizers.adamw import AdamW
from pipemesh.layers.optimizers.muon import Muon

__all__ = ["Adafactor", "AdamW", "Muon"]
