"""The flags that say how a model is run: its plan."""

from __future__ import annotations

import re
from collections.abc import Mapping

from absl import flags

from pipemesh.errors import LayoutError, MeshError, PipemeshError, ScheduleError
from pipemesh.plan.plan import LOWERINGS, OF_PIPELINES
from pipemesh.plan.text_form import of_value
from pipemesh.schedule.names import listing
from pipemesh.training.command import host_flags
from pipemesh.training.command.flags import PLAN, FlagError, check_number, define_devices, group

FLAGS = flags.FLAGS

# Flags that are defined here belong to the program that asks for them.
flags.disclaim_key_flags()

# The flag that changes each value of the plan.
OF_PLAN = {
    "mesh_shape": "mesh",
    "layout": "layout",
    "schedule": "schedule",
    "num_microbatches": "num_microbatches",
    "boundaries": "boundaries",
    "remat": "remat",
    "lowering": "lowering",
    "compute_dtype": "compute_dtype",
    "allow_idle": "allow_idle",
}
# What one program for all devices runs by, where nobody says otherwise.
OF_SIMD = {"schedule": "gpipe", "remat": "full"}


@group(PLAN)
def define(
    microbatches: str = "the model's", remat: str = "the model's", batch: str = "batch"
) -> None:
    """Defines them.

    Args:
        microbatches: the default of `--num_microbatches`, in words.
        remat: the default of `--remat`, in words.
        batch: what the dim of examples is called in layouts.
    """
    define_devices(
        None,
        None,
        "Mesh of devices; its axis `layers` has stages; or auto, auto:8 for 8 devices: the plan "
        "whose step is shortest by forecast. Default: the model's.",
        f"What is split over the mesh's other axes: `{batch}:data` gives each stage a replica for "
        "each place along the axis `data`.",
    )
    flags.DEFINE_boolean(
        "allow_idle", None, "Whether devices may idle along axes that nothing is split over."
    )
    flags.DEFINE_integer(
        "num_microbatches", None, f"Microbatches a batch; default: {microbatches}."
    )
    flags.DEFINE_boolean("plain", False, "Train without a pipeline, on one device, for comparison.")
    flags.DEFINE_string(
        "schedule",
        None,
        f"The pipeline schedule: {listing(for_layers=True)}; default: the model's.",
    )
    flags.DEFINE_string(
        "boundaries",
        None,
        "Where the layers are cut, such as 0,3,7; default: the model's, or stages of equal flops.",
    )
    flags.DEFINE_string(
        "remat",
        None,
        "What the backward pass computes again: full, none, except_last or twice, or one of them "
        f"for each stage, as in full,none; default: {remat}.",
    )
    flags.DEFINE_enum(
        "compute_dtype",
        None,
        ["float32", "bfloat16", "float16"],
        "What stages compute in; weights are float32 in any case.",
    )
    flags.DEFINE_enum(
        "lowering",
        None,
        list(LOWERINGS),
        "How stages run: by operations of their own in the order of the schedule ('placement'), or "
        "as one program that all devices run, a loop over blocks that are alike ('simd'); default: "
        "the model's, placement.",
    )
    flags.DEFINE_boolean(
        "strict_devices", False, "Whether an operation that leaves its stage's device is an error."
    )
    host_flags.define()


def given() -> dict[str, str]:
    """What is asked for otherwise than the model has it, by names of `Plan.to_values`.

    Raises:
        FlagError: the number of microbatches is none.
    """
    if FLAGS.num_microbatches is not None:
        check_number("num_microbatches", FLAGS.num_microbatches)
    asked = {
        name: of_value(FLAGS[flag].value)
        for flag, name in OF_PLAN.items()
        if FLAGS[flag].value is not None
    }
    return OF_SIMD | asked if FLAGS.lowering == "simd" else asked


def error_of(error: PipemeshError, values: Mapping[str, str], more: str = "") -> FlagError:
    """An error of a plan as one that names the flag.

    Args:
        error: that `Plan.from_values` raised, or a check of the plan.
        values: of the plan.
        more: to be added.
    """
    told = f"{error}{more}"
    name = value_of(error) or "mesh"
    flag = next(flag for flag, own in OF_PLAN.items() if own == name)
    if told.startswith(f"{name}="):
        return FlagError(f"--{flag}{told.removeprefix(name)}")
    return FlagError(f"--{flag}={values[name]!r}: {told}")


def value_of(error: PipemeshError) -> str | None:
    """Returns the value of a plan that an error is about, by its name; None if it is not known.

    Args:
        error: of a plan, such as `remat is 'FULL'; ...`.
    """
    first = re.match(r"(?:the )?(\w+)", str(error))
    if first and first[1] in OF_PLAN.values():
        return first[1]
    of_types = {LayoutError: "layout", ScheduleError: "schedule", MeshError: "mesh"}
    return of_types.get(type(error))


def check_plain(num_devices: int, compute_dtype: str | None) -> None:
    """Checks what `--plain` goes with: there is nothing to cut, to order, to recompute or to time.

    Args:
        num_devices: of the plan's mesh.
        compute_dtype: of the plan.

    Raises:
        FlagError: a flag asks for what a model without a pipeline has not.
    """
    there = [name for name in (*OF_PIPELINES, "trace_schedule") if FLAGS[name].present]
    if there:
        raise FlagError(
            f"--plain has no pipeline, for which --{there[0]} is; leave one of them out"
        )
    if num_devices > 1:
        raise FlagError(
            f"--plain computes on one device, but --mesh_shape={FLAGS.mesh_shape!r} has "
            f"{num_devices}; use --mesh_shape=layers:1"
        )
    if compute_dtype == "float16":
        raise FlagError(
            "--plain does not scale the loss, which float16 needs; use --compute_dtype=bfloat16"
        )
