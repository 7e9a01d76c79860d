"""The flags, and what they ask for: checked as far as it can be without TensorFlow."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import sys
from typing import Any

from absl import flags

from models import config
from models.command import FlagError, define_devices
from models.command import parse as parse_flags
from models.one_billion_word import simd_plan
from models.one_billion_word.request import EVAL_BATCHES, ON_NONFINITE, Request
from models.one_billion_word.sizes import LAYERS, OPTIMIZERS, SIZES, Settings, dims_of
from pipemesh.checkpoint import Manifest, newest
from pipemesh.errors import (
    CheckpointError,
    LayoutError,
    PipemeshError,
    PlanError,
    ScheduleError,
)
from pipemesh.mesh import LayoutRules
from pipemesh.plan import Plan
from pipemesh.plan.plan import LOWERINGS
from pipemesh.plan.text_form import of_value
from pipemesh.schedule_names import listing
from pipemesh.text import nearest

FLAGS = flags.FLAGS

flags.DEFINE_string("model", "OneBillionWordTiny", "Name of the configuration.", short_name="m")
define_devices(
    None,
    None,
    "Mesh of devices; its axis `layers` has stages; default: the model's.",
    "What is split over the mesh's other axes: `batch:data` gives each stage a replica for each "
    "place along the axis `data`.",
)
flags.DEFINE_boolean(
    "allow_idle", None, "Whether devices may idle along axes that nothing is split over."
)
flags.DEFINE_integer(
    "num_microbatches",
    None,
    "Microbatches a batch; default: the fastest, by the schedule and the memory there is.",
)
flags.DEFINE_enum(
    "layers",
    None,
    list(LAYERS),
    "Layers with named dims, of which --layout may split heads, d_ff and vocab as well as the "
    "batch, or those of lingvo, which is another model. Default: the model's, named.",
)
flags.DEFINE_integer("batch_size", None, "Rows a batch; default: the model's.")
flags.DEFINE_integer("vocab_size", None, "SentencePiece pieces; default: the model's.")
flags.DEFINE_integer("sequence_length", None, "Tokens a row; default: the model's.")
flags.DEFINE_boolean("plain", False, "Train without a pipeline, on one device, for comparison.")
flags.DEFINE_string(
    "schedule",
    None,
    f"The pipeline schedule: {listing()}; default: the model's.",
)
flags.DEFINE_string(
    "boundaries",
    None,
    "Where the layers are cut, such as 0,3,7; default: the model's, or stages of equal flops.",
)
flags.DEFINE_enum(
    "remat",
    None,
    ["full", "none", "except_last"],
    "What the backward pass computes again; default: nothing, if memory is known to suffice.",
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
    "How stages run: by operations of their own in the order of the schedule ('placement'), or as "
    "one program that all devices run, a loop over blocks that are alike ('simd'); default: the "
    "model's, placement.",
)
flags.DEFINE_boolean(
    "strict_devices", False, "Whether an operation that leaves its stage's device is an error."
)
flags.DEFINE_enum(
    "optimizer",
    None,
    list(OPTIMIZERS),
    "How weights move along their gradients; each wants a --learning_rate of its own. "
    "Default: the model's.",
)
flags.DEFINE_float("learning_rate", None, "Factor of the learning rate; default: the model's.")
flags.DEFINE_integer("steps", 300, "Train up to this step.", lower_bound=0)
flags.DEFINE_string("logdir", None, "Folder of checkpoints, summaries and vocabulary.")
flags.DEFINE_string("data_dir", None, "Folder of text; default: text that comes with Python.")
flags.DEFINE_string("train_pattern", None, "Glob below --data_dir of the text to train on.")
flags.DEFINE_string("heldout_pattern", None, "Glob below --data_dir of the text to judge by.")
flags.DEFINE_bool(
    "other_text",
    False,
    "Go on from a checkpoint with other text than it was trained on, under its vocabulary.",
)
flags.DEFINE_bool(
    "trace_schedule",
    False,
    "After training, two more steps that time every action; writes schedule.html and "
    "schedule_trace.json (chrome://tracing) into --logdir, predicted beside measured.",
)
flags.DEFINE_integer("seed", 0, "Seed of weights, data order and dropout.")
flags.DEFINE_integer("eval_every", 100, "Evaluate every so many steps.", lower_bound=1)
flags.DEFINE_integer(
    "eval_batches",
    None,
    "Held-out batches to judge by, drawn evenly from all; default: "
    f"{EVAL_BATCHES} while training, and all at the end.",
    lower_bound=1,
)
flags.DEFINE_integer("save_every", 100, "Save every so many steps.", lower_bound=1)
flags.DEFINE_enum(
    "on_nonfinite",
    "skip",
    list(ON_NONFINITE),
    "What to do with a step whose loss or gradients are not finite: leave the weights as they are "
    "and go on with the next batch, or end training.",
)
flags.DEFINE_integer("max_to_keep", 3, "Keep so many of the newest checkpoints.", lower_bound=1)
flags.DEFINE_integer(
    "keep_best",
    0,
    "Keep so many checkpoints besides, of those that were judged the best: of steps at which "
    "--eval_every and --save_every meet.",
    lower_bound=0,
)

_SEEDS = range(-(2**63), 2**63)
# What tensors of int32 and float32 hold.
_LARGEST = {int: 2**31 - 1, float: 3.4e38}
# The flag that changes each of the settings.
_OF_SETTINGS = {
    "batch_size": "BATCH_SIZE",
    "vocab_size": "VOCAB_SIZE",
    "sequence_length": "SEQUENCE_LENGTH",
    "optimizer": "OPTIMIZER",
    "learning_rate": "LEARNING_RATE",
    "layers": "LAYERS",
}
# The flag that changes each value of the plan.
_OF_PLAN = {
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
# Those that are nothing without a pipeline.
_OF_PIPELINES = ("num_microbatches", "schedule", "boundaries", "remat", "lowering")
# Those that say where a training lies, or what is to be done this time.
_OF_A_CALL = ("logdir", "config", "other_text", "trace_schedule")
_OF_REQUEST = (
    "steps",
    "save_every",
    "eval_every",
    "eval_batches",
    "other_text",
    "trace_schedule",
    "on_nonfinite",
    "max_to_keep",
    "keep_best",
)


def parse(argv: list[str], about: str | None) -> None:
    """Parses the command line, as `models.command.parse`.

    Args:
        argv: the program and its arguments.
        about: what help begins with; None for what the docstring here says.

    Raises:
        FlagError: a flag is unknown or malformed, or an argument is none.
    """
    parse_flags(argv, sys.modules[__name__], about)


def take_up() -> dict[str, Any]:
    """Takes flags that are not given as the training was begun with, whose folder is given.

    Returns:
        Those that were taken.

    Raises:
        FlagError: as `request`.
    """
    path = newest(_logdir())
    try:
        note = Manifest.read(path).note if path else {}
    except CheckpointError:
        # Whoever goes on from it says so.
        return {}
    program = sys.modules[__name__]
    known = config.names(program)
    kept = {name: value for name, value in note.get("flags", {}).items() if name in known}
    return config.apply(kept, str(path), program)


def _logdir() -> str:
    return os.path.join("runs", FLAGS.model) if FLAGS.logdir is None else FLAGS.logdir


def request() -> Request:
    """What the flags ask for.

    Raises:
        PipemeshError: a value cannot be had, or does not go with another.
    """
    if FLAGS.model not in SIZES:
        near = nearest(FLAGS.model, SIZES)
        hint = f"; did you mean {near}?" if near else "."
        raise FlagError(f"--model={FLAGS.model!r} is unknown{hint} Models are {', '.join(SIZES)}")
    for flag in ("logdir", "data_dir", "train_pattern", "heldout_pattern"):
        if FLAGS[flag].value == "":
            raise FlagError(f"--{flag}='' is empty; give a value, or leave the flag out")
    if FLAGS.seed not in _SEEDS:
        raise FlagError(f"--seed={FLAGS.seed}: it must fit into 64 bits, from -2**63 to 2**63 - 1")
    settings = SIZES[FLAGS.model]()
    for flag, attribute in _OF_SETTINGS.items():
        value = FLAGS[flag].value
        if value is not None:
            if not isinstance(value, str):
                _check_number(flag, value)
            setattr(settings, attribute, value)
    if settings.LAYERS == "lingvo" and (settings.TIED_EMBEDDINGS or settings.NUM_EXPERTS):
        what = "experts" if settings.NUM_EXPERTS else "one table for the first and the last layer"
        raise FlagError(
            f"--layers=lingvo: {FLAGS.model} has {what}, which layers with named dims alone have; "
            "leave --layers out, or choose another --model"
        )
    settings.PLAN = _plan(settings)
    is_simd = settings.PLAN.lowering == "simd"
    fixed = simd_plan.DEFAULTS if is_simd else {}
    settings.CHOSEN = tuple(
        name for name in settings.CHOSEN if name not in fixed and not FLAGS[name].present
    )
    if FLAGS.plain:
        _set_plain(settings)
    settings.DATA_DIR = FLAGS.data_dir
    settings.TRAIN_PATTERN, settings.HELDOUT_PATTERN = FLAGS.train_pattern, FLAGS.heldout_pattern
    settings.SEED = FLAGS.seed
    settings.STRICT_DEVICES = FLAGS.strict_devices
    _check_plan(settings)
    if is_simd:
        simd_plan.check_simd(settings, FLAGS.trace_schedule)
    given = config.given(sys.modules[__name__])
    return Request(
        FLAGS.model,
        settings,
        FLAGS.device_type,
        _logdir(),
        given={name: value for name, value in given.items() if name not in _OF_A_CALL},
        **{name: getattr(FLAGS, name) for name in _OF_REQUEST},
    )


def _plan(settings: Settings) -> Plan:
    """The model's plan, with all that is asked for otherwise."""
    given = {
        name: of_value(FLAGS[flag].value)
        for flag, name in _OF_PLAN.items()
        if FLAGS[flag].value is not None
    }
    if FLAGS.num_microbatches is not None:
        _check_number("num_microbatches", FLAGS.num_microbatches)
    values = settings.PLAN.to_values() | given
    if values["lowering"] == "simd":
        values |= simd_plan.DEFAULTS | given
    if FLAGS.plain and "mesh" not in given:
        values["mesh"] = "layers:1"
    if settings.PLAN.boundaries is not None and "boundaries" not in given:
        # They are for the model's own number of stages.
        free = _made(values | {"boundaries": ""}, settings)
        if free.num_stages != settings.PLAN.num_stages:
            return free
    return _made(values, settings)


def _made(values: dict[str, str], settings: Settings) -> Plan:
    try:
        plan = Plan.from_values(values)
        plan.check_dims(dims_of(settings, plan.layout))
        return plan
    except PipemeshError as error:
        told = str(error)
        named = copy.copy(settings)
        named.LAYERS = "named"
        more = {*dims_of(named, LayoutRules())} - {*dims_of(settings, LayoutRules())}
        if not more.isdisjoint(_dims_of(values)):
            told += "; layers with named dims have it: --layers=named"
        for flag, name in _OF_PLAN.items():
            if told.startswith(f"{name}="):
                raise FlagError(f"--{flag}{told.removeprefix(name)}") from error
        flag = {LayoutError: "layout", ScheduleError: "schedule"}.get(type(error), "mesh_shape")
        raise FlagError(f"--{flag}={values[_OF_PLAN[flag]]!r}: {told}") from error


def _dims_of(values: dict[str, str]) -> list[str]:
    """The names of the dims that a layout is said to split."""
    return [rule.partition(":")[0].strip() for rule in values["layout"].split(";")]


def _check_plan(settings: Settings) -> None:
    """Whether the layers and the batch can be cut as the plan says."""
    plan, layers = settings.PLAN, settings.NUM_LAYERS + 2
    try:
        plan.check_layers(layers)
    except PlanError as error:
        raise FlagError(f"--mesh_shape={str(plan.mesh)!r}: {FLAGS.model}: {error}") from error
    size = settings.BATCH_SIZE
    uneven = size % plan.num_replicas
    if "num_microbatches" in settings.CHOSEN and not uneven:
        return
    try:
        plan.check_batch(size)
    except PlanError as error:
        flag = f"batch_size={size}" if uneven else f"num_microbatches={plan.num_microbatches}"
        raise FlagError(f"--{flag}: {error}") from error


def _set_plain(settings: Settings) -> None:
    """Without a pipeline there is nothing to cut, to order, to recompute or to time."""
    given = [name for name in (*_OF_PIPELINES, "trace_schedule") if FLAGS[name].present]
    if given:
        raise FlagError(
            f"--plain has no pipeline, for which --{given[0]} is; leave one of them out"
        )
    plan = settings.PLAN
    if plan.mesh.num_devices > 1:
        raise FlagError(
            f"--plain computes on one device, but --mesh_shape={FLAGS.mesh_shape!r} has "
            f"{plan.mesh.num_devices}; use --mesh_shape=layers:1"
        )
    if plan.compute_dtype == "float16":
        raise FlagError(
            "--plain does not scale the loss, which float16 needs; use --compute_dtype=bfloat16"
        )
    settings.PIPELINED, settings.CHOSEN = False, ()
    settings.PLAN = dataclasses.replace(plan, num_microbatches=1, remat="none")


def _check_number(flag: str, value: float) -> None:
    largest = _LARGEST[type(value)]
    if not value > 0:
        raise FlagError(f"--{flag}={value}: it must be above 0")
    if not (math.isfinite(value) and value <= largest):
        raise FlagError(f"--{flag}={value}: it must be finite, at most {largest}")
