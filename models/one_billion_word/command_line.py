"""The flags, and what they ask for: checked as far as it can be without TensorFlow."""

from __future__ import annotations

import math
import os
import sys

from absl import flags

from models.one_billion_word.request import EVAL_BATCHES, Request, replicas
from models.one_billion_word.sizes import SIZES, Settings
from pipemesh.errors import PipemeshError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.schedule import ScheduleSpec
from pipemesh.schedule_names import listing
from pipemesh.text import nearest

FLAGS = flags.FLAGS

flags.DEFINE_string("model", "OneBillionWordTiny", "Name of the configuration.", short_name="m")
flags.DEFINE_string("mesh_shape", "layers:2", "Mesh of devices; its axis `layers` has stages.")
flags.DEFINE_string(
    "layout",
    "",
    "What is split over the mesh's other axes: `batch:data` gives each stage a replica for each "
    "place along the axis `data`.",
)
flags.DEFINE_enum("device_type", "CPU", ["CPU", "GPU"], "What the devices are.")
flags.DEFINE_integer(
    "num_microbatches",
    None,
    "Microbatches a batch; default: the fastest, by the schedule and the memory there is.",
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
flags.DEFINE_boolean(
    "strict_devices", False, "Whether an operation that leaves its stage's device is an error."
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

_HELP = {"-h", "-?", "--?"} | {
    dashes + name for dashes in ("-", "--") for name in ("help", "helpshort", "helpfull")
}
_SEEDS = range(-(2**63), 2**63)
# What tensors of int32 and float32 hold.
_LARGEST = {int: 2**31 - 1, float: 3.4e38}
# The flag that changes each of the settings.
_OF_SETTINGS = {
    "num_microbatches": "NUM_MICRO_BATCHES",
    "batch_size": "BATCH_SIZE",
    "vocab_size": "VOCAB_SIZE",
    "sequence_length": "SEQUENCE_LENGTH",
    "schedule": "SCHEDULE",
    "remat": "REMAT",
    "compute_dtype": "COMPUTE_DTYPE",
    "learning_rate": "LEARNING_RATE",
}


_OF_REQUEST = (
    "steps",
    "save_every",
    "eval_every",
    "eval_batches",
    "other_text",
    "trace_schedule",
)


class FlagError(PipemeshError, ValueError):
    """A flag has a value that cannot be had."""


def parse(argv: list[str], about: str) -> None:
    """Parses the command line; shows help and ends the program where that is asked for.

    Args:
        argv: the program and its arguments.
        about: what help begins with.

    Raises:
        FlagError: a flag is unknown or malformed, or an argument is none.
    """
    asked = argv[1 : argv.index("--") if "--" in argv else None]
    if _HELP & set(asked):
        print(f"{about}\n{FLAGS.module_help(sys.modules[__name__])}")
        sys.exit(0)
    try:
        rest = FLAGS(argv)
    except flags.Error as error:
        raise FlagError(str(error)) from error
    if len(rest) > 1:
        raise FlagError(f"{rest[1]!r} is no flag; flags begin with --")


def request() -> Request:
    """What the flags ask for.

    Raises:
        PipemeshError: a value cannot be had, or does not go with another.
    """
    mesh, layout = _mesh()
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
            settings.CHOSEN = tuple(name for name in settings.CHOSEN if name != attribute)
    if FLAGS.plain:
        _set_plain(settings, mesh)
    settings.DATA_DIR = FLAGS.data_dir
    settings.TRAIN_PATTERN, settings.HELDOUT_PATTERN = FLAGS.train_pattern, FLAGS.heldout_pattern
    settings.SEED = FLAGS.seed
    settings.STRICT_DEVICES = FLAGS.strict_devices
    _set_stages(settings, mesh)
    _check_batch(settings, replicas(mesh, layout))
    logdir = os.path.join("runs", FLAGS.model) if FLAGS.logdir is None else FLAGS.logdir
    return Request(
        FLAGS.model,
        settings,
        mesh,
        layout,
        FLAGS.device_type,
        logdir,
        **{name: FLAGS[name].value for name in _OF_REQUEST},
    )


def _check_batch(settings: Settings, replicas: int) -> None:
    """Each microbatch has as many rows for each replica."""
    size, number = settings.BATCH_SIZE, settings.NUM_MICRO_BATCHES
    if size % replicas:
        raise FlagError(
            f"the batch of {size} (--batch_size) does not divide among the {replicas} replicas of "
            f"--mesh_shape={FLAGS.mesh_shape!r} with --layout={FLAGS.layout!r}; use another size"
        )
    if "NUM_MICRO_BATCHES" not in settings.CHOSEN and size % (number * replicas):
        divisors = [n for n in range(1, size + 1) if size % (n * replicas) == 0]
        of = "" if replicas == 1 else f" among {replicas} replicas"
        raise FlagError(
            f"--num_microbatches={number} does not divide the batch of {size} (--batch_size){of}; "
            f"it may be {', '.join(map(str, divisors))}"
        )


def _set_plain(settings: Settings, mesh: Mesh) -> None:
    """Without a pipeline there is nothing to cut, to order, to recompute or to time."""
    given = [
        name
        for name in ("num_microbatches", "schedule", "remat", "trace_schedule")
        if FLAGS[name].present
    ]
    if given:
        raise FlagError(
            f"--plain has no pipeline, for which --{given[0]} is; leave one of them out"
        )
    if mesh.num_devices > 1:
        raise FlagError(
            f"--plain computes on one device, but --mesh_shape={FLAGS.mesh_shape!r} has "
            f"{mesh.num_devices}; use --mesh_shape=layers:1"
        )
    if settings.COMPUTE_DTYPE == "float16":
        raise FlagError(
            "--plain does not scale the loss, which float16 needs; use --compute_dtype=bfloat16"
        )
    settings.PIPELINED, settings.NUM_MICRO_BATCHES = False, 1
    settings.REMAT, settings.CHOSEN = "none", ()


def _mesh() -> tuple[Mesh, LayoutRules]:
    try:
        mesh = Mesh.from_text(FLAGS.mesh_shape)
    except PipemeshError as error:
        raise FlagError(f"--mesh_shape={FLAGS.mesh_shape!r}: {error}") from error
    try:
        layout = LayoutRules.from_text(FLAGS.layout)
        layout.check(mesh, ["batch"])
    except PipemeshError as error:
        raise FlagError(f"--layout={FLAGS.layout!r}: {error}") from error
    if layout.axis("batch") == "layers":
        raise FlagError(
            f"--layout={FLAGS.layout!r}: along the axis 'layers' lie the stages; split the batch "
            "over another axis, for example --mesh_shape='layers:2;data:2' --layout=batch:data"
        )
    used = ("layers", layout.axis("batch"))
    idle = [name for name, size in mesh.axes if name not in used and size > 1]
    if idle:
        hint = f"--layout=batch:{idle[0]}, or use" if layout.axis("batch") is None else "use"
        raise FlagError(
            f"--mesh_shape={FLAGS.mesh_shape!r}: nothing is split over the axis {idle[0]!r}, so "
            f"its devices would idle; {hint} the axis 'layers' alone, for example 'layers:2'"
        )
    return mesh, layout


def _check_number(flag: str, value: float) -> None:
    largest = _LARGEST[type(value)]
    if not value > 0:
        raise FlagError(f"--{flag}={value}: it must be above 0")
    if not (math.isfinite(value) and value <= largest):
        raise FlagError(f"--{flag}={value}: it must be finite, at most {largest}")


def _set_stages(settings: Settings, mesh: Mesh) -> None:
    try:
        spec = ScheduleSpec.from_text(settings.SCHEDULE)
        stages = spec.build(mesh.size("layers"), settings.NUM_MICRO_BATCHES).num_stages
    except PipemeshError as error:
        raise FlagError(f"--schedule={settings.SCHEDULE}: {error}") from error
    if settings.BLOCKS_PER_STAGE is not None and len(settings.BLOCKS_PER_STAGE) != stages:
        settings.BLOCKS_PER_STAGE = None
    settings.NUM_STAGES = stages
    most = settings.NUM_LAYERS + 2
    if stages > most:
        raise FlagError(
            f"--mesh_shape={FLAGS.mesh_shape!r} and --schedule={settings.SCHEDULE!r} ask for "
            f"{stages} stages, but {FLAGS.model} has {most} layers; use at most {most} stages"
        )
