"""lingvo optimizers that are correct on weights that a layout cuts into slices.

Example:
    >>> from lingvo.core import learner
    >>> from pipemesh.layers.optimizers import Adafactor
    >>> adafactor = Adafactor.Params().Set(beta1=0.9, clipping_threshold=1.0)
    >>> params = learner.Learner.Params().Set(name="loss", optimizer=adafactor)
"""

from pipemesh.layers.optimizers.adafactor import Adafactor
from pipemesh.layers.optimizers.right_on_slices import check_learner

__all__ = ["Adafactor", "check_learner"]
