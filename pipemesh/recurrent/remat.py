"""What is computed again in the backward pass, stage by stage and microbatch by microbatch."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable

from pipemesh.errors import PipelineError
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Mode:
    """How one backward pass comes by what its forward pass computed.

    Attributes:
        name: for the eye.
        recomputed: gives for a stage which nodes of its forward pass are computed again.
    """

    name: str
    recomputed: Callable[[TracedStage], Callable[[str], bool]]


FULL = Mode("full", lambda traced: lambda node: True)
NONE = Mode("none", lambda traced: lambda node: False)


class RematPolicy(abc.ABC):
    """Which mode each backward pass has."""

    @abc.abstractmethod
    def modes(self, schedule: Schedule) -> dict[tuple[int, int], Mode]:
        """For each (stage, microbatch) of a valid schedule how its backward pass is done."""


@dataclasses.dataclass(frozen=True)
class _Always(RematPolicy):
    mode: Mode

    def modes(self, schedule: Schedule) -> dict[tuple[int, int], Mode]:
        return dict.fromkeys(_pairs(schedule), self.mode)


class _ExceptLast(RematPolicy):
    """Nothing again where the backward pass follows at once on its device.

    In torchgpipe, from which it has its name, that is the last microbatch.
    """

    def modes(self, schedule: Schedule) -> dict[tuple[int, int], Mode]:
        at_once = schedule.turns_at_once()
        return {pair: NONE if pair in at_once else FULL for pair in _pairs(schedule)}


@dataclasses.dataclass(frozen=True)
class Selective(RematPolicy):
    """Recompute the layers that a predicate picks, keep what the others computed.

    A run of picked layers is computed again from the input of its first one. Layers are what
    `pipemesh.randomness.layer_scope` encloses; operations outside of any are kept.

    Attributes:
        predicate: of a layer's name; True if the layer is computed again.

    Example:
        >>> remat = Selective(lambda layer: layer.startswith("attention"))
        >>> remat.predicate("attention_3")
        True
    """

    predicate: Callable[[str], bool]

    def modes(self, schedule: Schedule) -> dict[tuple[int, int], Mode]:
        """The same for all.

        Raises:
            PipelineError: when a stage is looked at that has no layers to pick from.
        """
        return dict.fromkeys(_pairs(schedule), Mode("selective", self._recomputed))

    def _recomputed(self, traced: TracedStage) -> Callable[[str], bool]:
        names = set(traced.layers.values())
        if not names:
            raise PipelineError(
                f"remat is selective, but stage {traced.stage.name!r} has no layers to select "
                "from; enclose each layer in pipemesh.randomness.layer_scope(name)"
            )
        picked = {name for name in names if self.predicate(name)}
        return lambda node: traced.layers.get(node) in picked


# Those that have a name.
POLICIES: dict[str, RematPolicy] = {
    "full": _Always(FULL),
    "none": _Always(NONE),
    "except_last": _ExceptLast(),
}
REMAT_POLICIES = tuple(POLICIES)

Remat = str | RematPolicy


def policy_of(remat: Remat) -> RematPolicy:
    """The policy of a name, or the one that is given.

    Raises:
        PipelineError: it is neither.
    """
    if isinstance(remat, RematPolicy):
        return remat
    if isinstance(remat, str) and remat in POLICIES:
        return POLICIES[remat]
    allowed = ", ".join(REMAT_POLICIES)
    raise PipelineError(f"remat is {remat!r}; allowed are {allowed} and Selective(predicate)")


def _pairs(schedule: Schedule) -> list[tuple[int, int]]:
    return [
        (stage, microbatch)
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
    ]
