"""How a pipeline runs, apart from its schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

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
        rolled: whether the repeating part of the schedule becomes a loop of the graph, whose
            size then does not depend on the number of microbatches; with `ticks` all of it is
            one loop whose actions are data, so that the graph grows with the number of stages
            alone. By default there are loops where operations of their own for all actions would
            be more than 4,000 nodes and loops leave at most half of the actions, and one loop
            where else more than 30,000 nodes and 32 actions a device would be left.
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
    """

    batch_dim: int = 0
    sequence_dim: int = 1
    remat: AnyRemat = "full"
    rolled: bool | Literal["ticks"] | None = None
    compute_dtype: Any = None
    uncast_inputs: frozenset[int] = frozenset()
    loss_scale: LossScale | None = None
    check_numerics: str | None = None
    clock: Stamps | None = None
    strict_devices: bool = False
    noted_run: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        policy_of(self.remat)
        if self.rolled not in (None, False, True, "ticks"):
            raise PipelineError(
                f"rolled is {self.rolled!r}; give True, False, 'ticks', or None to have it chosen"
            )
        default = "results" if self.loss_scale is None else "loss"
        object.__setattr__(self, "check_numerics", check_policy(self.check_numerics or default))
        if self.check_numerics in OF_GRADIENTS and self.loss_scale is not None:
            raise PipelineError(
                f"check_numerics is {self.check_numerics!r}, but a loss_scale makes gradients "
                "overflow now and then; use 'forward' or 'loss', or no loss_scale"
            )
        object.__setattr__(self, "compute_dtype", check_compute_dtype(self.compute_dtype))
