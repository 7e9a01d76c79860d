"""Policies of recomputation in the backward pass, by stage and microbatch."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence

from pipemesh.errors import PipelineError, PlanError
from pipemesh.plan import Remat
from pipemesh.plan.remat import NAMES
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Mode:
    """The way in which one backward pass gets the results of its forward pass."""

    name: str
    # of a stage: a test of nodes of its forward pass
    recomputed: Callable[[TracedStage], Callable[[str], bool]]
    is_apart: bool = False  # an `R` recomputes, and leaves all results to later actions
    is_twice: bool = False  # a `W` recomputes, instead of getting results from its `I`

    @property
    def backward(self) -> Mode:
        """The mode of the actions `B`, `I` and `W` themselves."""
        return NONE if self.is_apart else self


FULL = Mode("full", lambda traced: lambda node: True)
TWICE = dataclasses.replace(FULL, name="twice", is_twice=True)
NONE = Mode("none", lambda traced: lambda node: False)


class RematPolicy(abc.ABC):
    """A choice of a mode for each backward pass."""

    @abc.abstractmethod
    def modes(self, schedule: Schedule) -> dict[tuple[int, int], Mode]:
        """Returns the mode of each (stage, microbatch) of a valid schedule."""


@dataclasses.dataclass(frozen=True)
class _Planned(RematPolicy):
    """The policy of a plan, with the value that forecasts use, too."""

    remat: Remat

    def modes(self, schedule: Schedule) -> dict[tuple[int, int], Mode]:
        modes = {mode.name: mode for mode in (FULL, TWICE, NONE)}
        try:
            return {pair: modes[name] for pair, name in self.remat.modes(schedule).items()}
        except PlanError as error:
            raise PipelineError(str(error)) from error


@dataclasses.dataclass(frozen=True)
class Selective(RematPolicy):
    """Recomputes the layers that a predicate chooses and keeps the results of the others.

    Consecutive chosen layers are recomputed from the input of the first one. Layers are the scopes
    of `pipemesh.randomness.layer_scope`. Operations outside of a layer are kept.

    Attributes:
        predicate: takes the name of a layer; returns True to recompute it.

    Example:
        >>> remat = Selective(lambda layer: layer.startswith("attention"))
        >>> remat.predicate("attention_3")
        True
    """

    predicate: Callable[[str], bool]

    def modes(self, schedule: Schedule) -> dict[tuple[int, int], Mode]:
        """Returns the same mode for all stages and microbatches.

        Raises:
            PipelineError: when the mode is used for a stage without layers.
        """
        pairs = itertools.product(range(schedule.num_stages), range(schedule.num_microbatches))
        return dict.fromkeys(pairs, Mode("selective", self._recomputed))

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
    """A separate policy for each stage.

    Under 1F1B, for example, the last stages keep the fewest microbatches and need no recomputation.

    Attributes:
        policies: names or policies, one per stage.

    Example:
        >>> from pipemesh.schedule import one_f_one_b
        >>> modes = ByStage(["full", "none"]).modes(one_f_one_b(2, 1))
        >>> [modes[stage, 0].name for stage in range(2)]
        ['full', 'none']
    """

    policies: Sequence[str | RematPolicy]

    def modes(self, schedule: Schedule) -> dict[tuple[int, int], Mode]:
        """Returns for each stage the modes of its policy.

        Raises:
            PipelineError: the number of policies is not the number of stages, or a policy is
                unknown.
        """
        if len(self.policies) != schedule.num_stages:
            raise PipelineError(
                f"remat has {len(self.policies)} policies, one a stage, but the schedule has "
                f"{schedule.num_stages} stages; give as many, or a single one for all"
            )
        return {
            pair: mode
            for stage, policy in enumerate(self.policies)
            for pair, mode in policy_of(policy).modes(schedule).items()
            if pair[0] == stage
        }


REMAT_POLICIES = NAMES

AnyRemat = str | Remat | RematPolicy


def remat_of(remat: AnyRemat) -> Remat:
    """Returns the plan's value for a policy: `custom` for one that only Python code defines."""
    if isinstance(remat, RematPolicy):
        return Remat.CUSTOM
    return remat if isinstance(remat, Remat) else Remat.from_text(remat)


def policy_of(remat: AnyRemat) -> RematPolicy:
    """Returns the policy for a text or a plan's value; a policy is returned as it is."""
    if isinstance(remat, RematPolicy):
        return remat
    with contextlib.suppress(PlanError):
        if not (value := remat_of(remat)).is_custom:
            return _Planned(value)
    allowed = ", ".join(REMAT_POLICIES)
    text = str(remat) if isinstance(remat, Remat) else remat
    raise PipelineError(
        f"remat is {text!r}; allowed are {allowed}, one of them for each stage with commas "
        "between, Selective(predicate) and ByStage(policies)"
    )


def modes_of(remat: AnyRemat, schedule: Schedule) -> dict[tuple[int, int], Mode]:
    """Returns the mode of each (stage, microbatch) of a valid schedule.

    An `R` of the schedule recomputes its whole stage, or the layers that a `Selective` chooses,
    whatever the policy says about other microbatches.
    """
    modes = dict(policy_of(remat).modes(schedule))
    for pair in schedule.recomputed():
        mode = modes[pair] if modes[pair].recomputed is not NONE.recomputed else FULL
        name = f"{mode.name}_apart"
        modes[pair] = dataclasses.replace(mode, name=name, is_apart=True, is_twice=False)
    return modes
