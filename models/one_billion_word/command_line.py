"""The flags of the language model, checked as far as possible without TensorFlow."""

from __future__ import annotations

import copy
import dataclasses
import os

from pipemesh.commands import learning_flags, training_flags, workers
from pipemesh.commands.flags import (
    FILES,
    FLAGS,
    MODEL,
    Flag,
    FlagError,
    check_number,
    check_seed,
    grouped,
)
from pipemesh.errors import PipemeshError, PlanError
from pipemesh.mesh import LayoutRules
from pipemesh.plan import Plan, Remat
from pipemesh.text import nearest
from pipemesh.training.learning import Learning, set_attributes

from . import simd_plan
from .request import Request
from .sizes import LAYERS, SIZES, Settings, dims_of

FLAGS_OF_TRAINING = (
    Flag(
        "model",
        default="OneBillionWordTiny",
        short="m",
        help=f"Name of the model: {', '.join(SIZES)}.",
        group=FILES,
    ),
    *training_flags.plan_flags(
        microbatches="the fastest, by the schedule and the available memory",
        remat="none, if memory is known to suffice",
    ),
    *training_flags.training_flags("drawn evenly from all"),
    *grouped(
        MODEL,
        Flag(
            "layers",
            choices=LAYERS,
            help="Layers with named dims, of which --layout may split heads, d_ff and vocab as "
            "well as the batch, or those of lingvo, which is another model. Default: the model's, "
            "named.",
        ),
        Flag("batch_size", int, help="Rows a batch; default: the model's."),
        Flag("vocab_size", int, help="SentencePiece pieces; default: the model's."),
        Flag("sequence_length", int, help="Tokens a row; default: the model's."),
        Flag(
            "dropout_prob",
            float,
            help="Dropout probability, from 0 on, below 1; default: the model's.",
        ),
        Flag(
            "ema_decay",
            float,
            help="Decay of the moving averages of weights, below 1, such as 0.999; evaluation "
            "uses the averages. Default: the model's, none.",
        ),
        *training_flags.FILTER_FLAGS,
    ),
    *learning_flags.LEARNING_FLAGS,
    *grouped(
        FILES,
        Flag("data_dir", help="Folder of text; default: text that comes with Python."),
        Flag("train_pattern", help="Glob below --data_dir of the text to train on."),
        Flag("heldout_pattern", help="Glob below --data_dir of the text to evaluate on."),
        Flag(
            "other_text",
            bool,
            False,
            help="Resume from a checkpoint with other text than it was trained on, under its "
            "vocabulary.",
        ),
        Flag("seed", int, 0, help="Seed of weights, data order and dropout."),
    ),
)
# The flag of each setting.
_OF_SETTINGS = {
    "batch_size": "BATCH_SIZE",
    "vocab_size": "VOCAB_SIZE",
    "sequence_length": "SEQUENCE_LENGTH",
    "dropout_prob": "DROPOUT_PROB",
    "ema_decay": "EMA_DECAY",
    "layers": "LAYERS",
    "freeze": "FREEZE",
    "train_only": "TRAIN_ONLY",
}


def logdir() -> str:
    """Returns the folder of checkpoints."""
    return os.path.join("runs", FLAGS.model) if FLAGS.logdir is None else FLAGS.logdir


def request() -> Request:
    """Returns the settings from the flags; raises PipemeshError for invalid or incompatible
    values.
    """
    if FLAGS.model not in SIZES:
        near = nearest(FLAGS.model, SIZES)
        hint = f"; did you mean {near}?" if near else "."
        raise FlagError(f"--model={FLAGS.model!r} is unknown{hint} Models are {', '.join(SIZES)}")
    for flag in ("logdir", "data_dir", "train_pattern", "heldout_pattern"):
        if FLAGS.value(flag) == "":
            raise FlagError(f"--{flag}='' is empty; give a value, or leave the flag out")
    check_seed(FLAGS.seed)
    settings = SIZES[FLAGS.model]()
    for flag, attribute in _OF_SETTINGS.items():
        value = FLAGS.value(flag)
        if value is not None:
            if flag != "dropout_prob" and not isinstance(value, str):
                check_number(flag, value)
            setattr(settings, attribute, value)
    set_attributes(settings, learning_flags.with_end(settings, FLAGS.value("steps")))
    if settings.LEARNING_RATE_SCHEDULE is None:
        # The Transformer's schedule falls from there on.
        check_number("warmup_steps", settings.WARMUP_STEPS)
    elif SIZES[FLAGS.model].LEARNING_RATE_SCHEDULE is None and not (
        FLAGS.is_given("learning_rate") or FLAGS.value("find_learning_rate")
    ):
        raise FlagError(
            f"--learning_rate_schedule={settings.LEARNING_RATE_SCHEDULE}: the model's learning "
            f"rate, {settings.LEARNING_RATE}, is a factor of its own schedule; give --learning_rate"
        )
    learning_flags.checked(lambda: Learning.of(settings))
    if not 0 <= settings.DROPOUT_PROB < 1:
        raise FlagError(
            f"--dropout_prob={settings.DROPOUT_PROB}: it must be 0 or more, and below 1"
        )
    if not settings.EMA_DECAY < 1:
        raise FlagError(f"--ema_decay={settings.EMA_DECAY}: it must be below 1")
    if settings.LAYERS == "lingvo" and (settings.TIED_EMBEDDINGS or settings.NUM_EXPERTS):
        what = "experts" if settings.NUM_EXPERTS else "one table for the first and the last layer"
        raise FlagError(
            f"--layers=lingvo: {FLAGS.model} has {what}, which layers with named dims alone have; "
            "leave --layers out, or choose another --model"
        )
    settings.PLAN = _plan(settings)
    is_simd = settings.PLAN.lowering == "simd"
    fixed = training_flags.OF_SIMD if is_simd else {}
    settings.CHOSEN = tuple(
        name
        for name in settings.CHOSEN
        if name not in fixed
        and not FLAGS.is_given(name)
        and not (name == "num_microbatches" and training_flags.microbatch_flag())
    )
    if FLAGS.plain:
        _set_plain(settings)
    settings.DATA_DIR = FLAGS.data_dir
    settings.TRAIN_PATTERN, settings.HELDOUT_PATTERN = FLAGS.train_pattern, FLAGS.heldout_pattern
    settings.SEED = FLAGS.seed
    settings.STRICT_DEVICES = FLAGS.strict_devices
    settings.COMPILE = FLAGS.compile
    _check_plan(settings)
    if is_simd:
        simd_plan.check_simd(settings, FLAGS.trace_schedule)
    return Request(
        model=FLAGS.model,
        settings=settings,
        device_type=FLAGS.device_type,
        logdir=logdir(),
        other_text=FLAGS.other_text,
        given=training_flags.saved_flags(),
        **training_flags.options(),
    )


def _plan(settings: Settings) -> Plan:
    """Returns the model's plan, changed by the flags."""
    given = training_flags.plan_values()
    sizes = settings.BATCH_SIZE, settings.SEQUENCE_LENGTH
    given |= training_flags.microbatches_of(lambda: sizes)
    values = settings.PLAN.to_values() | given
    if values["lowering"] == "simd":
        values |= training_flags.OF_SIMD | given
    if FLAGS.plain and "mesh" not in given:
        values["mesh"] = "layers:1"
    if settings.PLAN.boundaries is not None and "boundaries" not in given:
        # The boundaries belong to the model's default number of stages.
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
        named = copy.copy(settings)
        named.LAYERS = "named"
        more = {*dims_of(named, LayoutRules())} - {*dims_of(settings, LayoutRules())}
        hint = "; layers with named dims have it: --layers=named"
        told = "" if more.isdisjoint(_dims_of(values)) else hint
        raise training_flags.error_of(error, values, told) from error


def _dims_of(values: dict[str, str]) -> list[str]:
    """Returns the names of the dims that a layout splits."""
    return [rule.partition(":")[0].strip() for rule in values["layout"].split(";")]


def _check_plan(settings: Settings) -> None:
    """Checks that the plan can cut the layers and the batch."""
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
        name = training_flags.microbatch_flag() or "num_microbatches"
        value = FLAGS.value(name) or plan.num_microbatches
        flag = f"batch_size={size}" if uneven else f"{name}={value}"
        raise FlagError(f"--{flag}: {error}") from error


def fitting(settings: Settings, device_type: str) -> Plan:
    """Returns the plan of settings, or one for fewer devices; see `workers.fitting`."""

    def check(plan: Plan) -> None:
        other = copy.copy(settings)
        other.PLAN = plan
        _check_plan(other)
        if plan.lowering == "simd":
            simd_plan.check_simd(other, False)

    return workers.fitting(settings.PLAN, device_type, check)


def _set_plain(settings: Settings) -> None:
    """Removes schedule, remat and tracing, which need a pipeline."""
    plan = settings.PLAN
    training_flags.check_plain(plan.mesh.num_devices, plan.compute_dtype)
    settings.PIPELINED, settings.CHOSEN = False, ()
    settings.PLAN = dataclasses.replace(plan, num_microbatches=1, remat=Remat.NONE)
