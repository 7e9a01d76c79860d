"""Settings of a run of a pipeline, apart from its schedule."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from pipemesh.errors import PipelineError
from pipemesh.recurrent.precision import LossScale, check_compute_dtype
from pipemesh.recurrent.remat import AnyRemat, policy_of
from pipemesh.recurrent.watch.clock import Stamps
from pipemesh.recurrent.watch.health import OF_GRADIENTS, check_policy


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of a run of a pipeline; the defaults change no results.

    Attributes:
        batch_dim: the dim along which inputs are split and outputs joined.
        sequence_dim: the dim along which inputs are split and outputs joined if the schedule has
            sequence slices. Every slice gets an input without this dim as a whole.
        remat: `full` keeps only the stage inputs of each microbatch and recomputes the stage in the
            backward pass. `none` keeps everything that the backward pass needs. `except_last`
            recomputes nothing for a microbatch whose backward pass directly follows its forward
            pass. `twice` is `full`, but keeps only gradients between the halves `I` and `W` of a
            backward pass and recomputes the stage again in `W`. `Selective(predicate)` recomputes
            the layers that the predicate chooses. `ByStage(policies)`, or names joined by commas,
            sets a policy for each stage. An `R` of the schedule recomputes its stage in any case.
        loop: True makes the schedule one loop of the graph, which grows only with the number of
            stages. False gives each action its own operations, which makes steps slightly shorter.
            None chooses a loop if all actions together would have more than 30,000 nodes, or more
            than 10,000 with at least 100 each. Also, the loop must have at most half as many.
        compute_dtype: `float32`, `bfloat16` or `float16`. Floating weights and inputs are cast to
            it on their device before the stages use them, except weights of stages with their own
            dtypes. Gradients are summed over microbatches in the dtype of the weights (float32 for
            half-precision weights) and returned in the dtype of the weights. None casts nothing.
        uncast_inputs: indices of the inputs that keep their dtype, such as labels.
        loss_scale: multiplies the loss within the pipeline; float16 needs it.
        check_numerics: `results` raises `tf.errors.InvalidArgumentError` if the loss (or an output,
            if the loss is outside) or a gradient is not finite. `all` also names the layer and
            microbatch where that began, which makes the graph several times as large. `loss` and
            `forward` are the same without gradients, for a scaled loss whose gradients may
            overflow. `off` checks nothing. The default is `loss` with a `loss_scale`, else
            `results`. Every result of `pipeline` or `pipeline_loss`, and every gradient, waits for
            the check.
        clock: records when each action runs.
        strict_devices: raises an error if an operation of a stage is pinned to another device, or
            has no kernel for the device of its stage; see also `placement`.
        noted_run: is called with the run before it is performed, for `memory_of` and
            `transfers_of`.
        rolled: the old name of `loop`, for one release; `'ticks'` means True.
    """

    batch_dim: int = 0
    sequence_dim: int = 1
    remat: AnyRemat = "full"
    loop: bool | None = None
    compute_dtype: Any = None
    uncast_inputs: frozenset[int] = frozenset()
    loss_scale: LossScale | None = None
    check_numerics: str | None = None
    clock: Stamps | None = None
    strict_devices: bool = False
    noted_run: Callable[[Any], None] | None = None
    rolled: dataclasses.InitVar[bool | str | None] = None

    def __post_init__(self, rolled: bool | str | None) -> None:
        policy_of(self.remat)
        if rolled is not None:
            self._set_loop(rolled)
        if self.loop not in (None, False, True):
            raise PipelineError(
                f"loop={self.loop!r} is invalid. Use True, False, or None to choose by size."
            )
        default = "results" if self.loss_scale is None else "loss"
        object.__setattr__(self, "check_numerics", check_policy(self.check_numerics or default))
        if self.check_numerics in OF_GRADIENTS and self.loss_scale is not None:
            raise PipelineError(
                f"check_numerics is {self.check_numerics!r}, but a loss_scale makes gradients "
                "overflow now and then; use 'forward' or 'loss', or no loss_scale"
            )
        object.__setattr__(self, "compute_dtype", check_compute_dtype(self.compute_dtype))

    def _set_loop(self, rolled: bool | str) -> None:
        """Sets `loop` from its old name."""
        if rolled not in (False, True, "ticks"):
            raise PipelineError(f"rolled={rolled!r} is invalid. Use loop=True or loop=False.")
        loop = bool(rolled)
        if self.loop is not None:
            raise PipelineError(
                f"rolled={rolled!r} and loop={self.loop!r} were given. Use loop, the new name."
            )
        warnings.warn(
            f"rolled={rolled!r} is the old name of an option; use loop={loop}",
            FutureWarning,
            stacklevel=4,
        )
        object.__setattr__(self, "loop", loop)
