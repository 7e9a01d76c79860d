"""`--mesh_shape=auto`: the plan whose step is shortest; `--device_memory`: plans that fit."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from pipemesh.errors import PlanError
from pipemesh.partition.text import bytes_text
from pipemesh.plan.figures import FILE, Figures
from pipemesh.plan.plan import Plan
from pipemesh.plan.predict import predict
from pipemesh.plan.search import TRIALS, SearchSpace, nearest_that_fits, search
from pipemesh.text import bytes_of
from pipemesh.training.command import plan_flags
from pipemesh.training.command.flags import PLAN, FlagError, device_type, group
from pipemesh.training.run import console

FLAGS = flags.FLAGS

# Flags that are defined here belong to the program that asks for them.
flags.disclaim_key_flags()

AUTO = "auto"
# Those that say how the plan is found; the plan itself is kept.
NAMES = ("figures", "device_memory", "plan_trials")


@group(PLAN)
def define() -> None:
    """Defines the flags that say what plans are chosen from."""
    flags.DEFINE_string(
        "figures",
        None,
        "What `pipemesh plan --save` measured of the model, for forecasts, also those "
        f"that the report compares with; default: {FILE} in the log directory, which is measured "
        "if it is wanted and not there.",
    )
    flags.DEFINE_string(
        "device_memory",
        None,
        "What a device has, such as 16GiB: a plan that needs more by forecast is refused.",
    )
    flags.DEFINE_integer(
        "plan_trials",
        None,
        f"Of how many of the best plans by forecast --mesh_shape={AUTO} runs some steps, to take "
        f"the fastest; default: {TRIALS} if the model is measured for it, and 0 with --figures.",
        lower_bound=0,
    )


def is_asked() -> bool:
    """Whether the mesh is to be chosen."""
    return "mesh_shape" in FLAGS and (FLAGS.mesh_shape or "").partition(":")[0] == AUTO


def refuse(what: str) -> None:
    """Checks that a program that knows no forecast is not asked for a choice.

    Args:
        what: it does, for the error.

    Raises:
        FlagError: it is.
    """
    if is_asked():
        raise FlagError(
            f"--mesh_shape={FLAGS.mesh_shape!r}: forecasts are of steps of training, not of "
            f"{what}; give a mesh, such as layers:1"
        )


def take(logdir: str) -> None:
    """Replaces `auto` by the plan whose step is shortest, and says so.

    That is so by forecast; of the best ones steps are run, if that is asked for.

    Other flags of the plan that are given stay. From then on it is as if the flags had been given,
    so a training that goes on has the same plan.

    Args:
        logdir: the folder of the training.

    Raises:
        FlagError: there is no such plan, or the flags do not go together.
        PlanError: figures are malformed.
    """
    if not is_asked():
        return
    asked = f"--mesh_shape={FLAGS.mesh_shape!r}"
    if FLAGS.plain:
        raise FlagError(f"{asked}: --plain computes on one device; leave one of them out")
    fixed = {name: value for name, value in plan_flags.given().items() if name != "mesh"}
    if fixed.get("lowering", "placement") != "placement":
        raise FlagError(
            f"{asked}: forecasts are of --lowering=placement; give a mesh, or leave "
            f"--lowering={FLAGS.lowering} out"
        )
    devices = _devices(asked)
    figures = _figures(logdir, devices, asked)
    batch = _batch(figures, asked)
    trial = ""
    try:
        if number := _trials(figures, batch, asked):
            first = _fastest(logdir, devices, batch, fixed, number, asked)
            plan = Plan.from_values(first["plan"])
            # As the machine is now.
            best = dataclasses.replace(predict(plan, figures, batch), seconds=first["seconds"])
            trial = f"{1e3 * first['trial']:.4g} ms a step in a trial, "
        else:
            best = search(figures, SearchSpace(devices, batch, _memory(), fixed), count=1)[0]
    except PlanError as error:
        raise FlagError(f"{asked}: {error}") from error
    values = best.plan.to_values()
    chosen: dict[str, str] = {}
    for flag, name in plan_flags.OF_PLAN.items():
        is_default = flag in ("boundaries", "layout") and not values[name]
        if flag in _CHOSEN and not is_default and (flag == "mesh_shape" or name not in fixed):
            chosen[flag] = values[name]
            FLAGS[flag].parse(values[name])
    told = " ".join(f"--{flag}={value}" for flag, value in chosen.items())
    held = bytes_text(max(best.memory))
    print(
        f"chosen for {devices} devices: {told} ({trial}by forecast "
        f"{1e3 * best.seconds:.4g} ms a step, bubble {best.bubble:.1%}, {held} a device; "
        f"what binds: {best.binds})"
    )
    sys.stdout.flush()


def check_memory(plan: Plan, logdir: str) -> None:
    """Checks before the first step that a plan fits into `--device_memory`, if that is given.

    Args:
        plan: that is to be trained under.
        logdir: the folder of the training.

    Raises:
        FlagError: it does not; the nearest one that does is named.
        PlanError: nothing can be said of the plan.
    """
    memory = _memory() if "device_memory" in FLAGS else None
    if memory is None:
        return
    asked, devices = f"--device_memory={FLAGS.device_memory}", plan.mesh.num_devices
    figures = _figures(logdir, devices, asked)
    batch = _batch(figures, asked)
    held = max(predict(plan, figures, batch, parts=False).memory)
    if held <= memory:
        return
    told = f"{asked}: '{plan}' needs {bytes_text(held)} a device by forecast; "
    try:
        # The only value that changes results.
        fixed = {n: v for n, v in plan.to_values().items() if n == "compute_dtype" and v}
        near = nearest_that_fits(plan, figures, SearchSpace(devices, batch, memory, fixed))
    except PlanError as error:
        raise FlagError(f"{told}{error}") from error
    raise FlagError(
        f"{told}the nearest plan that fits is '{near.plan}', with "
        f"{bytes_text(max(near.memory))} and {1e3 * near.seconds:.4g} ms a step"
    )


def options() -> dict[str, Any]:
    """What of the options of a training is asked for here.

    Raises:
        FlagError: a size of memory is none.
        PlanError: there are no such figures, or they are malformed.
    """
    if FLAGS.figures is not None:
        Figures.read(FLAGS.figures)
    return {"figures": FLAGS.figures, "device_memory": _memory()}


def _memory() -> float | None:
    if FLAGS.device_memory is None:
        return None
    try:
        return bytes_of(FLAGS.device_memory)
    except ValueError as error:
        raise FlagError(f"--device_memory: {error}") from error


def _batch(figures: Figures, asked: str) -> int:
    batch = getattr(FLAGS, "batch_size", None) or figures.batch
    if not batch:
        raise FlagError(
            f"{asked}: the figures do not say how many rows a batch has; measure them with "
            "`pipemesh plan --model`"
        )
    return batch


_CHOSEN = ("mesh_shape", "layout", "schedule", "num_microbatches", "boundaries", "remat")


def _devices(asked: str) -> int:
    """How many there are: those that are given, or GPUs, or cores."""
    _, separator, text = FLAGS.mesh_shape.partition(":")
    if separator:
        if not text.isdecimal() or int(text) < 1:
            raise FlagError(f"{asked} must be auto, or auto:N for N devices, such as auto:8")
        return int(text)
    if device_type(0) == "GPU":
        import tensorflow as tf

        return max(1, len(tf.config.list_physical_devices("GPU")))
    return os.cpu_count() or 1


def _figures(logdir: str, devices: int, asked: str) -> Figures:
    path = FLAGS.figures or os.path.join(logdir, FILE)
    if FLAGS.figures is None and not os.path.exists(path):
        _measure(path, devices, asked)
    try:
        with open(path, encoding="utf-8") as file:
            return Figures.from_json(file.read(), path)
    except OSError as error:
        raise FlagError(f"--figures={path!r} cannot be read ({error.strerror})") from error


def _trials(figures: Figures, batch: int, asked: str) -> int:
    """Of how many plans steps are to be run."""
    number: int | None = FLAGS.plan_trials
    if number is None:
        is_measured_here = FLAGS.figures is None and _is_registered()
        return TRIALS if is_measured_here and batch == figures.batch else 0
    if number and not _is_registered():
        raise FlagError(
            f"{asked}: --plan_trials={number} runs steps of a registered model, and "
            f"{FLAGS.model!r} is none; leave it out, or choose from what `pipemesh plan "
            f"--model=package.module.Class --trials={number}` prints"
        )
    return number


def _fastest(
    logdir: str, devices: int, batch: int, fixed: Mapping[str, str], number: int, asked: str
) -> dict[str, Any]:
    """The plan whose steps are shortest, of the best by forecast, as `pipemesh plan` writes it."""
    words = [FLAGS.figures or os.path.join(logdir, FILE), f"--trials={number}", f"--batch={batch}"]
    words += [f"--fix={name}={value}" for name, value in fixed.items()]
    if FLAGS.device_memory is not None:
        words.append(f"--memory={FLAGS.device_memory}")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "plans.json")
        _run([*words, f"--json={path}"], "running steps of the best plans", devices, asked)
        with open(path, encoding="utf-8") as file:
            return json.load(file)[0]


def _measure(path: str, devices: int, asked: str) -> None:
    if not _is_registered():
        raise FlagError(
            f"{asked}: nothing was measured of {FLAGS.model!r}; measure the model as it is "
            f"registered, `pipemesh plan --model=package.module.Class --devices={devices} "
            "--save=FILE`, and give --figures=FILE"
        )
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    failed = f"{asked}: the model cannot be measured"
    _run([f"--save={path}"], "measuring the model", devices, failed)


def _is_registered() -> bool:
    """Whether the model has a name by which another process can make it."""
    return "." in (FLAGS.model or "")


def _run(words: Sequence[str], doing: str, devices: int, failed: str) -> None:
    """Runs `pipemesh plan` in a process of its own: this one makes its devices by the plan."""
    words = ["plan", *words, f"--model={FLAGS.model}", f"--devices={devices}"]
    words += [f"--device-type={device_type(devices)}", "--count=1"]
    with console.waiting(doing):
        done = subprocess.run(
            [sys.executable, "-m", "pipemesh.cli", *words],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        told = last.removeprefix("pipemesh: error: ")
        raise FlagError(f"{failed}: {told}")
