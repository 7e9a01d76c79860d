"""Requirements of `--lowering=simd` on a plan and a model, checked without TensorFlow."""

from __future__ import annotations

from pipemesh.commands.flags import FlagError
from pipemesh.schedule.builders import is_looped

from .sizes import Settings


def alike_boundaries(settings: Settings) -> tuple[int, ...]:
    """Returns boundaries that give all stages the same number of blocks.

    The embedding belongs to the first stage and the softmax to the last one, though all devices
    compute them. The number of blocks must be a multiple of the number of stages.

    Example:
        >>> from .sizes import Base
        >>> from pipemesh.plan import Plan
        >>> settings = Base()
        >>> settings.PLAN = Plan("layers:3", schedule="gpipe", lowering="simd")
        >>> alike_boundaries(settings)
        (0, 3, 5, 8)
    """
    number, count = settings.NUM_LAYERS, settings.PLAN.num_stages
    return (0, *(1 + number * stage // count for stage in range(1, count)), number + 2)


def check_simd(settings: Settings, trace_schedule: bool) -> None:
    """Raises FlagError, with the flag to change, if a model's blocks cannot run as one program."""
    plan = settings.PLAN
    stages = plan.num_stages
    if settings.LAYERS == "lingvo":
        _refuse("layers=lingvo", "is for layers with named dims", "leave --layers out")
    if not is_looped(plan.table):
        _refuse(
            f"schedule={plan.schedule}",
            "runs gpipe, or looped_bfs:V with V stages a device",
            "use one of these",
        )
    if not plan.remat.is_full:
        _refuse(f"remat={plan.remat}", "computes all again", "leave --remat out")
    if plan.compute_dtype == "float16":
        _refuse("compute_dtype=float16", "does not scale the loss", "use --compute_dtype=bfloat16")
    if settings.STRICT_DEVICES:
        _refuse("strict_devices", "does not look into stages", "leave it out")
    if settings.COMPILE:
        _refuse("compile", "has no passes that XLA could compile", "leave it out")
    if trace_schedule:
        _refuse("trace_schedule", "has no actions of their own to time", "leave it out")
    if settings.NUM_LAYERS % stages:
        _refuse(
            f"mesh_shape='{plan.mesh}'",
            f"gives each stage as many blocks, of which the model has {settings.NUM_LAYERS}, for "
            f"{stages} stages",
            "use a number of stages that divides it",
        )
    wanted = alike_boundaries(settings)
    if plan.boundaries not in (None, wanted):
        _refuse(
            f"boundaries={','.join(map(str, plan.boundaries or ()))}",
            "gives each stage as many blocks",
            f"use --boundaries={','.join(map(str, wanted))}, or leave it out",
        )


def _refuse(flag: str, why: str, way_out: str) -> None:
    raise FlagError(f"--{flag}: --lowering=simd {why}; {way_out}, or use --lowering=placement")
