"""Flags of a plan and of a training; `--mesh_shape=auto`, and `--device_memory`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pipemesh.checkpoint import Manifest
from pipemesh.checkpoint.folder import path_of, steps_of
from pipemesh.commands import workers
from pipemesh.commands.flags import (
    FILES,
    FLAGS,
    PLAN,
    TRAINING,
    Flag,
    FlagError,
    check_number,
    grouped,
)
from pipemesh.commands.workers import HOST_FLAGS, device_flags, device_type
from pipemesh.errors import (
    CheckpointError,
    LayoutError,
    MeshError,
    PipemeshError,
    PlanError,
    ReportError,
    ScheduleError,
)
from pipemesh.plan.figures import FILE, SETTINGS, Figures, settings_of
from pipemesh.plan.plan import (
    DTYPES,
    LOWERINGS,
    OF_PIPELINES,
    Plan,
    divisors,
    parse_value,
    value_text,
)
from pipemesh.plan.predict import predict
from pipemesh.plan.search import TRIALS, SearchSpace, nearest_that_fits, search
from pipemesh.schedule.names import NAMES, listing, parse
from pipemesh.text import bytes_of, bytes_text, number
from pipemesh.training.learning import not_taken
from pipemesh.training.run import (
    EVAL_BATCHES,
    LOG_FORMATS,
    ON_NONFINITE,
    READERS,
    TRACKER,
    console,
    trackers,
)

# The flag that changes each value of the plan.
OF_PLAN = {"mesh_shape" if name == "mesh" else name: name for name in Plan().to_values()}
# What one program for all devices runs by, where nobody says otherwise.
OF_SIMD = {"schedule": "gpipe", "remat": "full"}
AUTO = "auto"
_CHOSEN = "mesh_shape layout schedule num_microbatches boundaries remat lowering".split()
# Flags of a training by which `pipemesh plan` measures a model.
MEASURED_FLAGS = (*SETTINGS, "train_data", "packing")
# They say how a plan is found; the plan itself is kept.
CHOICE_FLAGS = grouped(
    PLAN,
    Flag(
        "figures",
        help="File of `pipemesh plan --save`, for forecasts, also those that the report compares "
        f"with; default: {FILE} in the log directory, which is measured if it is needed and "
        "missing.",
    ),
    Flag(
        "device_memory",
        help="Memory per device, such as 16GiB: a plan whose forecast needs more is refused.",
    ),
    Flag(
        "plan_trials",
        int,
        least=0,
        help=f"Number of top-ranked plans to benchmark with --mesh_shape={AUTO} before choosing "
        f"one; default: {TRIALS} if the model is measured for it, and 0 with --figures.",
    ),
)


# Which weights are trained.
FILTER_FLAGS = (
    Flag(
        "freeze",
        value="PATTERN",
        help="Weights that are not trained, a regular expression of their names, such as "
        "cell_00[0-7]/ for the first eight layers.",
    ),
    Flag(
        "train_only",
        value="PATTERN",
        help="The only weights that are trained, a regular expression of their names.",
    ),
)


def plan_flags(microbatches: str = "the model's", remat: str = "the model's") -> tuple[Flag, ...]:
    """Returns the flags of the plan and of workers; the arguments are words of their help."""
    devices = device_flags(
        None,
        None,
        "Mesh of devices; its axis `layers` has stages; or auto, auto:8 for 8 devices: the plan "
        "with the shortest predicted step. Default: the model's.",
        "Dims that are split over the mesh's other axes: `batch:data` gives each stage a "
        "replica for each index along the axis `data`.",
    )
    plan = (
        Flag(
            "allow_idle",
            bool,
            help="Allow devices to idle: along axes that nothing is split over, or without a "
            "stage.",
        ),
        Flag("num_microbatches", int, help=f"Microbatches a batch; default: {microbatches}."),
        Flag("plain", bool, False, help="Run without a pipeline, on one device, for comparison."),
        Flag(
            "schedule",
            help=f"The pipeline schedule: {listing(for_layers=True)}; default: the model's.",
        ),
        Flag(
            "boundaries",
            help="First layer of each stage and the number of layers, such as 0,3,7; default: the "
            "model's, or stages of equal flops.",
        ),
        Flag(
            "remat",
            help="What the backward pass recomputes: full, none, except_last or twice, or one of "
            f"them for each stage, as in full,none; default: {remat}.",
        ),
        Flag(
            "compute_dtype",
            choices=DTYPES,
            help="Type that stages compute in; weights are float32 in any case.",
        ),
        Flag(
            "lowering",
            choices=LOWERINGS,
            help="How stages run: each action by its own operations, in the order of the schedule "
            "('placement'), or as one program for all devices, a loop over alike blocks ('simd'); "
            "default: the model's, placement.",
        ),
        Flag(
            "strict_devices",
            bool,
            False,
            help="Treat an operation that leaves its stage's device as an error.",
        ),
        Flag(
            "compile",
            bool,
            False,
            help="Let XLA compile what stages compute; a warning names what it does not take. "
            "Faster on many GPUs, slower on CPUs.",
        ),
    )
    return (*grouped(PLAN, *devices, *plan), *HOST_FLAGS)


def plan_values() -> dict[str, str]:
    """Returns the values of the plan that flags set, by names of `Plan.to_values`."""
    if FLAGS.num_microbatches is not None:
        check_number("num_microbatches", FLAGS.num_microbatches)
    values = {
        name: value_text(FLAGS.value(flag))
        for flag, name in OF_PLAN.items()
        if FLAGS.value(flag) is not None
    }
    # Before TensorFlow is loaded.
    for name in ("mesh", "layout", "schedule", "remat"):
        if name in values and not (name == "mesh" and is_auto()):
            try:
                parse_value(name, values[name])
                if name == "schedule":
                    parse(values[name])
            except PipemeshError as error:
                raise error_of(error, values) from error
    return OF_SIMD | values if FLAGS.lowering == "simd" else values


# Flags that set the number of microbatches.
_NUMBER, _TOKENS = "num_microbatches", "tokens_per_microbatch"


def microbatch_flag() -> str | None:
    """Returns the name of the given flag that sets the number of microbatches, if any."""
    return next((name for name in (_NUMBER, _TOKENS) if FLAGS.value(name) is not None), None)


def microbatches_of(sizes: Callable[[], tuple[int | None, int | None]]) -> dict[str, str]:
    """Returns the value of the plan for --tokens_per_microbatch, none without it.

    `sizes` returns the rows of a batch and the tokens of a row; None if they are not known.
    """
    tokens = FLAGS.value(_TOKENS)
    if tokens is None:
        return {}
    given = f"--{_TOKENS}={tokens}"
    if FLAGS.value(_NUMBER) is not None:
        raise FlagError(f"{given}: --{_NUMBER}={FLAGS.num_microbatches} sets it; leave one out")
    rows, length = sizes()
    if not (rows and length):
        raise FlagError(
            f"{given}: the model has no BATCH_SIZE and SEQUENCE_LENGTH, by which a batch has so "
            f"many tokens; use --{_NUMBER}"
        )
    number, rest = divmod(rows * length, tokens)
    if rest or rows % max(number, 1):
        allowed = ", ".join(str(rows * length // n) for n in reversed(divisors(rows)))
        raise FlagError(
            f"{given} does not divide a batch of {rows} rows of {length} tokens into microbatches "
            f"of whole rows. Use one of {allowed}"
        )
    return {_NUMBER: str(number)}


def check_trains() -> None:
    """Checks that a stack of layers can train by `--schedule`."""
    text = FLAGS.value("schedule")
    if text is None:
        return
    try:
        known = NAMES.get(parse(text, for_layers=True).name)
    except ScheduleError as error:
        raise FlagError(f"--schedule={text!r}: {error}") from error
    if known is not None and not known.trains:
        raise FlagError(
            f"--schedule={text!r} has no backward actions, so it trains nothing; give one of "
            f"{listing(for_layers=True)}"
        )


def error_of(error: PipemeshError, values: Mapping[str, str], more: str = "") -> FlagError:
    """Converts an error of a plan with these values to one that names the flag."""
    told = f"{error}{more}".replace("set allow_idle", "give --allow_idle")
    name = value_of(error) or "mesh"
    flag = next(flag for flag, own in OF_PLAN.items() if own == name)
    if told.startswith(f"{name}="):
        return FlagError(f"--{flag}{told.removeprefix(name)}")
    # The flag and its value come first in any case.
    told = told.removeprefix(f"{name} is {values[name]!r}; ")
    return FlagError(f"--{flag}={values[name]!r}: {told}")


def value_of(error: PipemeshError) -> str | None:
    """Returns the value of a plan that an error is about, by its name; None if it is not known."""
    first = re.match(r"(?:the )?(\w+)", str(error))
    if first and first[1] in OF_PLAN.values():
        return first[1]
    of_types = {LayoutError: "layout", ScheduleError: "schedule", MeshError: "mesh"}
    return of_types.get(type(error))


# Flags of what stages do, which no plan has.
_OF_STAGES = ("strict_devices", "compile", "trace_schedule")


def check_plain(num_devices: int, compute_dtype: str | None) -> None:
    """Refuses flags of pipelines with `--plain`."""
    there = [name for name in (*_OF_STAGES, *OF_PIPELINES) if FLAGS.is_given(name)]
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


def is_auto() -> bool:
    """Returns whether the mesh is to be chosen."""
    return (FLAGS.value("mesh_shape") or "").partition(":")[0] == AUTO


def choose_plan(logdir: str) -> None:
    """Replaces `auto` by the plan with the shortest predicted step, and prints it.

    The best plans are benchmarked if that is requested. Other flags of the plan that are given
    stay. The chosen flags count as given from then on, so a resumed training has the same plan.
    """
    if not is_auto():
        return
    asked = f"--mesh_shape={FLAGS.mesh_shape!r}"
    if FLAGS.plain:
        raise FlagError(f"{asked}: --plain computes on one device; leave one of them out")
    if FLAGS.value(_TOKENS) is not None:
        raise FlagError(
            f"{asked}: it chooses microbatches by itself, or takes --{_NUMBER}; leave --{_TOKENS} "
            "out"
        )
    fixed = {name: value for name, value in plan_values().items() if name != "mesh"}
    devices = _devices(asked)
    figures, batch = _figures(logdir, devices, asked)
    trial = ""
    try:
        if trials := _trials(figures, batch, asked):
            first = _fastest(logdir, devices, batch, fixed, trials, asked)
            plan = Plan.from_values(first["plan"])
            # As the machine is now.
            best = dataclasses.replace(predict(plan, figures, batch), seconds=first["seconds"])
            trial = f"{number(1e3 * first['trial'])} ms a step in a trial, "
        else:
            best = search(figures, SearchSpace(devices, batch, _memory(), fixed), count=1)[0]
    except PlanError as error:
        raise FlagError(f"{asked}: {error}") from error
    values = best.plan.to_values()
    chosen: dict[str, str] = {}
    for flag in _CHOSEN:
        value = values[OF_PLAN[flag]]
        is_default = value == {"boundaries": "", "layout": "", "lowering": "placement"}.get(flag)
        if flag not in fixed and not is_default:
            chosen[flag] = value
            FLAGS.take(flag, value)
    told = " ".join(f"--{flag}={value}" for flag, value in chosen.items())
    held = bytes_text(max(best.memory))
    print(
        f"chosen for {devices} devices: {told} ({trial}by forecast "
        f"{number(1e3 * best.seconds)} ms a step, bubble {best.bubble:.1%}, {held} a device; "
        f"what binds: {best.binds})"
    )
    sys.stdout.flush()


def check_memory(plan: Plan, logdir: str) -> None:
    """Checks before the first step that a plan fits into `--device_memory`, if that is given."""
    memory = _memory()
    if memory is None:
        return
    asked, devices = f"--device_memory={FLAGS.device_memory}", plan.mesh.num_devices
    figures, batch = _figures(logdir, devices, asked)
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
        f"{bytes_text(max(near.memory))} and {number(1e3 * near.seconds)} ms a step"
    )


def _memory() -> float | None:
    if FLAGS.value("device_memory") is None:
        return None
    try:
        return bytes_of(FLAGS.device_memory)
    except ValueError as error:
        raise FlagError(f"--device_memory: {error}") from error


def _devices(asked: str) -> int:
    """Returns the number of devices: the one given, or that of GPUs, or of cores."""
    _, separator, text = FLAGS.mesh_shape.partition(":")
    if separator:
        if not text.isdecimal() or int(text) < 1:
            raise FlagError(f"{asked} must be auto, or auto:N for N devices, such as auto:8")
        return int(text)
    if device_type(0) == "GPU":
        import tensorflow as tf

        return max(1, len(tf.config.list_physical_devices("GPU")))
    return os.cpu_count() or 1


def _figures(logdir: str, devices: int, asked: str) -> tuple[Figures, int]:
    """Returns the figures of the model, measured here if there are none, and the batch size."""
    path = FLAGS.figures or os.path.join(logdir, FILE)

    def read() -> Figures:
        try:
            return Figures.read(path)
        except PlanError as error:
            raise FlagError(f"--figures: {error}") from error

    is_given, now = FLAGS.figures is not None, settings_of(FLAGS.given())
    figures = read() if is_given or os.path.exists(path) else None
    if figures is None or not (is_given or figures.settings == now):
        if not _is_registered():
            raise FlagError(
                f"{asked}: nothing was measured of {FLAGS.model!r}; measure the model as it is "
                f"registered, `pipemesh plan --model=package.module.Class --devices={devices} "
                "--save=FILE`, and give --figures=FILE"
            )
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        failed = f"{asked}: the model cannot be measured"
        words = [f"--save={path}", f"--logdir={logdir}"]
        _run(words, "measuring the model", devices, failed)
        figures = read()
    batch = FLAGS.value("batch_size") or figures.batch
    if not batch:
        raise FlagError(
            f"{asked}: the figures do not say the batch size; measure them with "
            "`pipemesh plan --model`"
        )
    return figures, batch


def _trials(figures: Figures, batch: int, asked: str) -> int:
    """Returns the number of plans to run steps of."""
    trials: int | None = FLAGS.plan_trials
    if trials is None:
        is_measured_here = FLAGS.figures is None and _is_registered()
        return TRIALS if is_measured_here and batch == figures.batch else 0
    if trials and not _is_registered():
        raise FlagError(
            f"{asked}: --plan_trials={trials} runs steps of a registered model, and "
            f"{FLAGS.model!r} is none; leave it out, or choose from what `pipemesh plan "
            f"--model=package.module.Class --trials={trials}` prints"
        )
    return trials


def _fastest(
    logdir: str, devices: int, batch: int, fixed: Mapping[str, str], trials: int, asked: str
) -> dict[str, Any]:
    """Returns the plan with the shortest measured steps, as `pipemesh plan` writes it."""
    words = [
        FLAGS.figures or os.path.join(logdir, FILE),
        f"--trials={trials}",
        f"--batch_size={batch}",
        f"--logdir={logdir}",
    ]
    words += [f"--fix={name}={value}" for name, value in fixed.items()]
    if FLAGS.device_memory is not None:
        words.append(f"--device_memory={FLAGS.device_memory}")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "plans.json")
        _run([*words, f"--json={path}"], "running steps of the best plans", devices, asked)
        with open(path, encoding="utf-8") as file:
            return json.load(file)[0]


def _is_registered() -> bool:
    """Returns whether the model has a name by which another process can make it."""
    return "." in (FLAGS.model or "")


def _run(words: Sequence[str], doing: str, devices: int, failed: str) -> None:
    """Runs `pipemesh plan` in a process of its own: this one makes its devices by the plan."""
    words = ["plan", *words, f"--model={FLAGS.model}", f"--devices={devices}"]
    words += [f"--device_type={device_type(devices)}", "--count=1"]
    given = FLAGS.given()
    words += [f"--{name}={given[name]}" for name in MEASURED_FLAGS if name in given]
    with console.waiting(doing):
        done = subprocess.run(
            [sys.executable, "-m", "pipemesh", *words],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        told = last.removeprefix("error: ")
        raise FlagError(f"{failed}: {told}")


# With fewer a step of the test is as large as the range that is looked for.
_FEWEST_RATES = 50
# Those that say where a training lies, or what is to be done this time.
_OF_A_CALL = (
    "logdir",
    "config",
    "other_text",
    "trace_schedule",
    "find_learning_rate",
    "log_format",
    "profile_steps",
    "read_data",
    *(flag.name for flag in CHOICE_FLAGS),
    *workers.NAMES,
)


def training_flags(drawn: str = "the first ones") -> tuple[Flag, ...]:
    """Returns the flags of training; `drawn` describes the held-out batches that are evaluated."""
    return (
        *CHOICE_FLAGS,
        Flag(
            "logdir",
            value="FOLDER",
            help="Folder of checkpoints, summaries and the like; default: runs/ and the "
            "name of the model.",
            group=FILES,
        ),
        *grouped(
            TRAINING,
            Flag(
                "steps",
                int,
                300,
                least=0,
                help="Train up to this step; a model's own p.train.max_steps is the default before "
                "this one.",
            ),
            Flag(
                "read_data",
                default="client",
                choices=READERS,
                help="Who reads the data: this program; or of --cluster the worker of the first "
                "stage, so that no batch passes this program. Files and modules then lie on "
                "workers under the same paths.",
            ),
            Flag(
                "steps_per_call",
                int,
                1,
                least=1,
                help="Most steps in one call of TensorFlow's graph; saves time between the steps "
                "of small models. Results are the same: a call ends where something else is due, "
                "and signals are answered after it.",
            ),
            Flag(
                "tokens_per_microbatch",
                int,
                value="N",
                least=1,
                help="Tokens of a microbatch, of sources and targets, padding included, instead of "
                "--num_microbatches.",
            ),
            Flag("eval_every", int, 100, least=1, help="Steps between evaluations."),
            Flag(
                "eval_batches",
                int,
                least=1,
                help=f"Held-out batches to evaluate on, {drawn}; default: {EVAL_BATCHES} while "
                "training, and all at the end.",
            ),
            Flag(
                "early_stop",
                int,
                0,
                least=0,
                help="End training after this many evaluations in a row that are no better than "
                "the best one before them; 0 for never.",
            ),
            Flag("save_every", int, 100, least=1, help="Steps between checkpoints."),
            Flag(
                "on_nonfinite",
                default="skip",
                choices=ON_NONFINITE,
                help="What to do with a step whose loss or gradients are not finite: leave the "
                "weights as they are and continue with the next batch, or end training.",
            ),
            Flag("max_to_keep", int, 3, least=1, help="Number of newest checkpoints to keep."),
            Flag(
                "keep_best",
                int,
                0,
                least=0,
                help="Number of checkpoints to keep besides, of those with the best evaluations: "
                "of steps at which --eval_every and --save_every meet.",
            ),
            Flag(
                "trace_schedule",
                bool,
                False,
                help="After training, run six more steps that time every action; writes "
                "schedule.html and schedule_trace.json (chrome://tracing) into --logdir, predicted "
                "beside measured. On GPUs an action ends when its kernels are queued.",
            ),
            Flag(
                "find_learning_rate",
                int,
                0,
                least=0,
                help="Instead of training, run a learning-rate range test with this many rising "
                "rates, for example 100; prints the rates at which the model learns, and writes "
                "learning_rates.csv into --logdir. No weights are saved.",
            ),
            Flag(
                "log_format",
                default="text",
                choices=LOG_FORMATS,
                help="Standard output has lines for people, or for programs an object of JSON a "
                "line and nothing else, the same as record.jsonl in --logdir; text goes to "
                "standard error then.",
            ),
            Flag(
                "tracker",
                default=TRACKER,
                value="NAMES",
                help=f"Trackers of experiments, with commas: {', '.join(trackers.TRACKERS)}; or "
                f"{trackers.NONE}. A resumed run continues its run there. Those that upload are "
                "set by their own variables, such as WANDB_MODE=offline and MLFLOW_TRACKING_URI.",
            ),
            Flag(
                "histogram_every",
                int,
                0,
                least=0,
                help="Steps between histograms of each weight, its gradient and its update, for "
                "the trackers tensorboard and wandb; 0 for none.",
            ),
            Flag(
                "profile_steps",
                value="FIRST:LAST",
                help="Profile these steps with TensorFlow's profiler, such as 10:15, from the 10th "
                "to the 15th; TensorBoard shows plugins/profile in --logdir. The first step builds "
                "the graph.",
            ),
        ),
    )


# Those that a program that does not train refuses.
OF_TRAINING = tuple(flag.name for flag in training_flags() if flag.group == TRAINING)


def options() -> dict[str, Any]:
    """Returns the `Options` that the flags give, but the log directory."""
    if 0 < FLAGS.find_learning_rate < _FEWEST_RATES:
        raise FlagError(
            f"--find_learning_rate={FLAGS.find_learning_rate}: too few to find a range; give "
            f"{_FEWEST_RATES} or more, such as 100, or 0 to train"
        )
    if FLAGS.find_learning_rate and FLAGS.trace_schedule:
        raise FlagError("--trace_schedule is for training; leave it or --find_learning_rate out")
    if FLAGS.find_learning_rate and FLAGS.log_format != "text":
        raise FlagError(
            f"--log_format={FLAGS.log_format} is for training; leave it or --find_learning_rate "
            "out (learning_rates.csv is for programs)"
        )
    if FLAGS.find_learning_rate and FLAGS.steps_per_call > 1:
        raise FlagError(
            f"--steps_per_call={FLAGS.steps_per_call}: --find_learning_rate may end after any "
            "step; leave one of them out"
        )
    profile_steps = _profile_steps()
    if FLAGS.figures is not None:
        Figures.read(FLAGS.figures)
    try:
        tracked = trackers.parse(FLAGS.tracker)
    except ReportError as error:
        raise FlagError(f"--tracker={FLAGS.tracker!r}: {error}") from error
    takers = [name for name, tracker in trackers.TRACKERS.items() if tracker.takes_histograms]
    if FLAGS.histogram_every and not set(takers).intersection(tracked):
        raise FlagError(
            f"--histogram_every={FLAGS.histogram_every}: --tracker={FLAGS.tracker} takes no "
            f"histograms; add {' or '.join(takers)} to it, or give --histogram_every=0"
        )
    return {
        **{name: FLAGS.value(name) for name in OF_TRAINING if name not in ("tracker", _TOKENS)},
        "trackers": tracked,
        "profile_steps": profile_steps,
        "figures": FLAGS.figures,
        "device_memory": _memory(),
    }


def _profile_steps() -> tuple[int, int] | None:
    """Returns the first and the last step to profile."""
    text = FLAGS.profile_steps
    if text is None:
        return None
    given = f"--profile_steps={text!r}"
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    if match is None:
        raise FlagError(f"{given}: give the first and the last step, such as 10:15")
    first, last = int(match[1]), int(match[2])
    if not 1 <= first <= last:
        raise FlagError(f"{given}: the first step is at least 1, and the last one not before it")
    if last > FLAGS.steps:
        raise FlagError(f"{given}: training ends at step {FLAGS.steps}; give more --steps")
    if FLAGS.find_learning_rate:
        raise FlagError(f"{given} is for training; leave it or --find_learning_rate out")
    return first, last


def saved_flags() -> dict[str, Any]:
    """Returns the flags that are given and kept with checkpoints, by name."""
    return {name: value for name, value in FLAGS.given().items() if name not in _OF_A_CALL}


def newest_note(logdir: str) -> tuple[str | None, Mapping[str, Any]]:
    """Returns path and note of the newest checkpoint with a readable manifest, or None and {}."""
    for step in reversed(steps_of(logdir)):
        path = path_of(logdir, step)
        # Whoever goes on from a damaged one says so.
        with contextlib.suppress(CheckpointError, OSError):
            return path, Manifest.read(path).note
    return None, {}


def take_up(
    logdir: str,
    checkpoint: str | None = None,
    leave: Collection[str] = (),
    about: str | None = "resuming with saved flags",
) -> None:
    """Takes flags that are not given from a checkpoint, and prints them after `about`.

    `about` may have `{path}` of the checkpoint. It is None for a program that runs no steps: that
    prints nothing, and has no `--mesh_shape=auto`.
    """
    if checkpoint:
        path, note = checkpoint, Manifest.read(checkpoint).note
    else:
        path, note = newest_note(logdir)
    known = set(FLAGS.names()).difference(leave)
    if FLAGS.plain and FLAGS.is_given("plain"):
        # What it was begun with is a pipeline's.
        known.difference_update(OF_PIPELINES, ("mesh_shape", "layout"))
    if FLAGS.is_given(_NUMBER) or FLAGS.is_given(_TOKENS):
        known.difference_update((_NUMBER, _TOKENS))
    rank = note.get("flags", {}).get("lora_rank")
    if not (FLAGS.value("lora_rank") if FLAGS.is_given("lora_rank") else rank):
        # Without a rank they mean nothing.
        known -= {name for name in known if name.startswith("lora_")}
    # Saved values of another schedule or optimizer than the given one.
    known -= not_taken(FLAGS.given())
    kept = {name: value for name, value in note.get("flags", {}).items() if name in known}
    taken = FLAGS.apply(kept, str(path))
    if about is None:
        if is_auto():
            raise FlagError(
                f"--mesh_shape={FLAGS.mesh_shape!r}: forecasts are of steps of training, not of "
                "texts; give a mesh, such as layers:1"
            )
        return
    if taken:
        words = " ".join(f"--{name}={value}" for name, value in taken.items())
        print(f"{about.format(path=path)}: {words}")
    choose_plan(logdir)
