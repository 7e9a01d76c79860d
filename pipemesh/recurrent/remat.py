"""What is computed again in the backward pass, stage by stage and microbatch by microbatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pipemesh.errors import PipelineError
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.schedule import Schedule

REMAT_POLICIES = ("full", "none", "except_last")


@dataclasses.dataclass(frozen=True)
class Selective:
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


Remat = str | Selective


def check_remat(remat: Remat) -> Remat:
    """Returns the policy if there is such a one.

    Raises:
        PipelineError: there is not.
    """
    if isinstance(remat, Selective) or remat in REMAT_POLICIES:
        return remat
    allowed = ", ".join(REMAT_POLICIES)
    raise PipelineError(f"remat is {remat!r}; allowed are {allowed} and Selective(predicate)")


def modes(remat: Remat, schedule: Schedule) -> dict[tuple[int, int], str]:
    """For each (stage, microbatch) how its backward pass comes by its activations.

    Args:
        remat: the policy.
        schedule: a valid schedule.

    Returns:
        `full`, `none` or `selective`. Under `except_last`, `none` where the backward pass follows
        the forward pass at once on its device (as in torchgpipe, where that is the last
        microbatch), and `full` elsewhere.
    """
    pairs = [(s, m) for s in range(schedule.num_stages) for m in range(schedule.num_microbatches)]
    if isinstance(remat, Selective):
        return dict.fromkeys(pairs, "selective")
    if remat != "except_last":
        return dict.fromkeys(pairs, remat)
    at_once = schedule.turns_at_once()
    return {pair: "none" if pair in at_once else "full" for pair in pairs}


def recomputed(mode: str, remat: Remat, traced: TracedStage) -> Callable[[str], bool]:
    """Whether a node of the forward pass is computed again.

    Args:
        mode: one of those that `modes` gives.
        remat: the policy.
        traced: the stage.

    Raises:
        PipelineError: the policy is selective, but the stage has no layers to pick from.
    """
    if mode != "selective":
        return lambda node: mode == "full"
    assert isinstance(remat, Selective)
    names = set(traced.layers.values())
    if not names:
        raise PipelineError(
            f"remat is selective, but stage {traced.stage.name!r} has no layers to select from; "
            "enclose each layer in pipemesh.randomness.layer_scope(name)"
        )
    picked = {name for name in names if remat.predicate(name)}
    return lambda node: traced.layers.get(node) in picked
