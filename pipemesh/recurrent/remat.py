"""What is computed again in the backward pass, stage by stage and microbatch by microbatch."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence

from pipemesh.errors import PipelineError, PlanError
from pipemesh.plan import Remat
from pipemesh.plan.remat import NAMES
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Mode:
    """How one backward pass comes by what its forward pass computed.

    Attributes:
        name: for the eye.
        recomputed: gives for a stage which nodes of its forward pass are computed again.
        is_apart: whether that is an action of its own, an `R`. All is there for what follows it.
        is_twice: whether a `W` computes them once more, instead of being handed them by its `I`.
    """

    name: str
    recomputed: Callable[[TracedStage], Callable[[str], bool]]
    is_apart: bool = False
    is_twice: bool = False

    @property
    def backward(self) -> Mode:
        """How the actions `B`, `I` and `W` themselves come by it."""
        return NONE if self.is_apart else self


FULL = Mode("full", lambda traced: lambda node: True)
TWICE = dataclasses.replace(FULL, name="twice", is_twice=True)
NONE = Mode("none", lambda traced: lambda node: False)


class RematPolicy(abc.ABC):
    """Which mode each backward pass has."""

    @abc.abstractmethod
    def modes(self, schedule: Schedule) -> dict[tuple[int, int], Mode]:
        """For each (stage, microbatch) of a valid schedule how its backward pass is done."""


@dataclasses.dataclass(frozen=True)
class _Planned(RematPolicy):
    """The policy of a plan; forecasts ask the same value."""

    remat: Remat

    def modes(self, schedule: Schedule) -> dict[tuple[int, int], Mode]:
        modes = {mode.name: mode for mode in (FULL, TWICE, NONE)}
        try:
            return {pair: modes[name] for pair, name in self.remat.modes(schedule).items()}
        except PlanError as error:
            raise PipelineError(str(error)) from error


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


@dataclasses.dataclass(frozen=True)
class ByStage(RematPolicy):
    """Another policy for each stage.

    Where the last stages hold least, as under 1F1B, they need not compute anything again.

    Attributes:
        policies: names or policies, one a stage.

    Example:
        >>> from pipemesh.schedule import one_f_one_b
        >>> modes = ByStage(["full", "none"]).modes(one_f_one_b(2, 1))
        >>> [modes[stage, 0].name for stage in range(2)]
        ['full', 'none']
    """

    policies: Sequence[str | RematPolicy]

    def modes(self, schedule: Schedule) -> dict[tuple[int, int], Mode]:
        """Of each stage those of its policy.

        Raises:
            PipelineError: there are not as many as the schedule has stages, or one is unknown.
        """
        if len(self.policies) != schedule.num_stages:
            raise PipelineError(
                f"remat has {len(self.policies)} policies, one a stage, but the schedule has "
                f"{schedule.num_stages} stages; give as many, or a single one for all"
            )
        every = [policy_of(policy).modes(schedule) for policy in self.policies]
        return {pair: every[pair[0]][pair] for pair in _pairs(schedule)}


REMAT_POLICIES = NAMES

AnyRemat = str | Remat | RematPolicy


def remat_of(remat: AnyRemat) -> Remat:
    """Returns the plan's value for a policy; `custom` for one that only Python knows.

    Raises:
        PlanError: a policy is unknown.
    """
    if isinstance(remat, RematPolicy):
        return Remat.CUSTOM
    return remat if isinstance(remat, Remat) else Remat.from_text(remat)


def policy_of(remat: AnyRemat) -> RematPolicy:
    """Returns the policy of a text, of a plan's value, or the given policy itself.

    Raises:
        PipelineError: it is none of them, or `custom`, which names no policy.
    """
    if isinstance(remat, RematPolicy):
        return remat
    try:
        value = remat_of(remat)
    except PlanError:
        value = Remat.CUSTOM
    if not value.is_custom:
        return _Planned(value)
    allowed = ", ".join(REMAT_POLICIES)
    given = str(remat) if isinstance(remat, Remat) else remat
    raise PipelineError(
        f"remat is {given!r}; allowed are {allowed}, one of them for each stage with commas "
        "between, Selective(predicate) and ByStage(policies)"
    )


def modes_of(remat: AnyRemat, schedule: Schedule) -> dict[tuple[int, int], Mode]:
    """For each (stage, microbatch) of a valid schedule how its backward pass is done.

    An `R` of the schedule computes all of its stage again, or what a `Selective` picks, whatever
    the others are to do.

    Args:
        remat: what is asked for.
        schedule: the table.

    Raises:
        PipelineError: see `policy_of` and `ByStage`.
    """
    modes = dict(policy_of(remat).modes(schedule))
    for pair in schedule.recomputed():
        mode = modes[pair] if modes[pair].recomputed is not NONE.recomputed else FULL
        name = f"{mode.name}_apart"
        modes[pair] = dataclasses.replace(mode, name=name, is_apart=True, is_twice=False)
    return modes


def _pairs(schedule: Schedule) -> list[tuple[int, int]]:
    return [
        (stage, microbatch)
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
    ]
