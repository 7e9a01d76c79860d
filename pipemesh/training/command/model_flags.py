"""The flags that name a registered model, and the subject that they ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from absl import flags

from pipemesh.errors import (
    CheckpointError,
    DeviceError,
    LayoutError,
    MeshError,
    PipemeshError,
    PlanError,
    ScheduleError,
)
from pipemesh.example_models import same_class
from pipemesh.mesh import Mesh
from pipemesh.plan import Plan
from pipemesh.training.command import auto_plan, host_flags, plan_flags
from pipemesh.training.command.flags import FILES, FlagError, check_seed, device_type, group

FLAGS = flags.FLAGS

# What a class gets the log directory in, if it has it: some models lie there in part.
_LOGDIR = "LOGDIR"

# Flags that are defined here belong to the program that asks for them.
flags.disclaim_key_flags()


@group(FILES)
def define() -> None:
    """Defines them, and those of the plan."""
    flags.DEFINE_string(
        "model",
        None,
        "The model: package.module.Class, a SingleTaskModelParams of lingvo; the folder that "
        "the command is called in is looked in first.",
        short_name="m",
    )
    plan_flags.define()
    flags.DEFINE_integer(
        "seed", 0, "Seed of weights and of what is drawn, if the task has no random_seed."
    )
    flags.DEFINE_string(
        "dataset", None, "The dataset to judge by; default: Dev, or else Test, if the model has it."
    )


def logdir() -> str:
    """The folder of checkpoints.

    Raises:
        FlagError: neither it nor a model is given.
    """
    if FLAGS.logdir:
        return FLAGS.logdir
    if FLAGS.logdir == "" or not FLAGS.model:
        raise FlagError(
            "which model? give --model=package.module.Class, or the --logdir of a training to go on"
        )
    return os.path.join("runs", FLAGS.model.rpartition(".")[2])


def subject() -> Any:
    """The model that is asked for, and TensorFlow with the devices of its plan.

    Raises:
        FlagError: there is no such model, or it cannot be run so.
    """
    from pipemesh.training.run import console

    if not FLAGS.model:
        raise FlagError(
            f"which model? --logdir={FLAGS.logdir!r} has no checkpoint that says; give "
            "--model=package.module.Class"
        )
    check_seed(FLAGS.seed)
    values = plan_flags.given()
    if FLAGS.plain:
        mesh = Mesh.from_text(values.setdefault("mesh", "layers:1"))
        plan_flags.check_plain(mesh.num_devices, FLAGS.compute_dtype)
    with console.waiting("loading TensorFlow"):
        from pipemesh.training.registered import RegisteredModel, find_model, mesh_before

        def new() -> Any:
            config = find_model(FLAGS.model)()
            if hasattr(config, _LOGDIR):
                setattr(config, _LOGDIR, logdir())
            return config

        def made(config: Any, values: Mapping[str, str]) -> RegisteredModel:
            return RegisteredModel(
                config,
                FLAGS.model,
                values,
                # Not known before Task() says the mesh.
                device_type=FLAGS.device_type or "CPU",
                seed=FLAGS.seed,
                plain=FLAGS.plain,
                strict_devices=FLAGS.strict_devices,
                dataset=FLAGS.dataset,
            )

        config = new()
        try:
            mesh = mesh_before(config, values)
            if mesh is not None:
                _start(mesh)
            model = made(config, values)
        except (LayoutError, MeshError, PlanError, ScheduleError) as error:
            raise _named(error, values) from error
        if FLAGS.trace_schedule and not model.has_actions():
            raise FlagError(
                f"--trace_schedule: {FLAGS.model} has no pipeline of single actions to time; leave "
                "it out"
            )
        if mesh is None:
            try:
                _start(model.plan.mesh)
                if FLAGS.device_type != model.device_type:
                    model = made(new(), values)
            except DeviceError as error:
                raise FlagError(
                    f"--model={FLAGS.model!r}: its Task() starts TensorFlow before it is known how "
                    f"many devices there are to be; give --mesh_shape='{model.plan.mesh}'"
                ) from error
        # The model's own layers say whether they can be cut otherwise.
        other: dict[str, Any] = {}

        def check(plan: Plan) -> None:
            changed = {name: text for name, (_, text) in model.plan.changes(plan).items()}
            other["model"] = made(new(), values | changed)

        if host_flags.fitting(model.plan, model.device_type, check) != model.plan:
            model = other["model"]
        auto_plan.check_memory(model.plan, logdir())
        from lingvo.core import py_utils

        py_utils.SetEagerMode(True)
    return model


def _start(mesh: Mesh) -> None:
    host_flags.start_tensorflow(mesh, device_type(mesh.num_devices))


def check_note(note: Mapping[str, Any], folder: str) -> None:
    """Checks that a checkpoint is of a registered model, and of the one that is asked for.

    Args:
        note: of the checkpoint.
        folder: that it lies in.

    Raises:
        CheckpointError: it is not.
    """
    there = note.get("model")
    if not isinstance(there, str):
        program = note.get("program", "another program")
        raise CheckpointError(
            f"--logdir={folder!r} holds a checkpoint of {program}; use that, or another --logdir"
        )
    if FLAGS.model and not same_class(there, FLAGS.model):
        raise CheckpointError(
            f"--logdir={folder!r} holds a checkpoint of another model ({there} there, "
            f"{FLAGS.model} now); give another --logdir"
        )


def _named(error: PipemeshError, values: Mapping[str, str]) -> FlagError:
    """An error of the plan as one of a flag, if a flag asked for it."""
    if plan_flags.value_of(error) in values:
        return plan_flags.error_of(error, values)
    return FlagError(f"--model={FLAGS.model!r}: {error}")
