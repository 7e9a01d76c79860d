"""How a pipeline runs, apart from its schedule."""

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
    """How a pipeline runs, apart from its schedule; the defaults change no results.

    Attributes:
        batch_dim: the dim along which inputs are cut and outputs joined.
        sequence_dim: the dim along which inputs are cut and outputs joined where the schedule has
            slices; inputs without it are given whole to every slice.
        remat: `full` keeps only each microbatch's stage inputs and computes the stage again in
            the backward pass; `none` keeps what the backward pass needs; `except_last` computes
            nothing again for a microbatch whose backward pass follows its forward pass at once;
            `twice` is as `full`, but between the halves `I` and `W` of a backward pass it keeps
            gradients only, and computes the stage once more in `W`; `Selective(predicate)` computes
            the layers again that the predicate picks. `ByStage(policies)`, or names with commas
            between, gives each stage its own. An `R` of the schedule computes its stage again in
            any case.
        loop: True makes the schedule one loop of the graph, which then grows with the number of
            stages only. False gives each action operations of its own, with which steps are a
            little shorter. None chooses by size: a loop if the actions would have more than 30,000
            nodes together, or more than 10,000 if they have 100 each, and the loop at most half.
        compute_dtype: `float32`, `bfloat16` or `float16`: floating weights and inputs are cast to
            it, on their device, before the stages see them, but for the weights of stages that
            have dtypes of their own. Gradients are summed over microbatches
            in the weights' own dtype, in float32 if that is of half precision, and come back in
            the own dtype. None casts nothing.
        uncast_inputs: numbers of the inputs that keep their dtype all the same, such as labels.
        loss_scale: multiplies the loss within the pipeline, which float16 needs.
        check_numerics: `results` raises `tf.errors.InvalidArgumentError` if the loss (or an output,
            while the loss is outside) or a gradient is not finite; `all` also says in which
            layer and microbatch that began, which makes the graph several times as large.
            `loss` and `forward` are the same without gradients, for a loss that is scaled until
            they overflow; `off` checks nothing. By default `loss` with a `loss_scale`, else
            `results`. Nothing that `pipeline` or `pipeline_loss` returns is there before the
            check has passed, and no gradient.
        clock: notes when each action runs.
        strict_devices: whether an operation of a stage that is pinned to another device, or has no
            kernel for the device of its stage, is an error; see also `placement`.
        noted_run: is given the run before it is performed, for `memory_of` and `transfers_of`.
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
