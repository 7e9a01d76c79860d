"""Kinds of models, as commands see them; the registered models of lingvo are one.

A kind has its flags, and makes from them what a command needs. A model with data or texts of its
own defines another kind, `KIND`, in the modules that its checkpoints name as `evaluated_by` and
`decoded_by`.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import operator
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pipemesh.checkpoint import Folder, Manifest, newest_whole
from pipemesh.checkpoint.files import remove_unfinished
from pipemesh.checkpoint.folder import hold, hold_newest
from pipemesh.checkpoint.manifest import WEIGHTS_ONLY
from pipemesh.commands import learning_flags, training_flags, workers
from pipemesh.commands.flags import (
    CONFIG,
    FILES,
    FLAGS,
    ConfigError,
    Flag,
    FlagError,
    Flags,
    check_seed,
    grouped,
    read_toml,
)
from pipemesh.data.rows import PACKINGS
from pipemesh.decoding_limits import SourcePrompt
from pipemesh.errors import (
    CheckpointError,
    DeviceError,
    LayoutError,
    MeshError,
    PlanError,
    ScheduleError,
)
from pipemesh.example_models import import_model_module, same_class
from pipemesh.mesh import Mesh
from pipemesh.plan import Plan
from pipemesh.text import is_missing
from pipemesh.training.learning import fall_later, set_attributes
from pipemesh.training.run import Options, console

# The flags of the last run in a log directory, for --config.
CONFIG_FILE = "config.toml"
# A class with this attribute gets the log directory in it: some models lie there in part.
_LOGDIR = "LOGDIR"
CHECKPOINT_FLAG = Flag(
    "checkpoint",
    value="PATH",
    help="Path of the checkpoint to use; default: the newest of --logdir.",
    group=FILES,
)
# They set attributes of the model's class with the same names.
ATTRIBUTE_FLAGS = grouped(
    FILES,
    Flag(
        "train_data",
        help="Documents to train on, for models that take them: files with optional weights, such "
        "as a.jsonl*0.7,b.parquet*0.3, tfds:NAME/SPLIT, or a .toml file of them.",
    ),
    Flag("heldout_data", help="Documents to evaluate on; default: the model's."),
    Flag(
        "packing",
        choices=PACKINGS,
        help="How documents share rows: each goes on in the next row (split), lies whole in one "
        "row, its end cut if it is longer (whole), or has a row for itself (single); default: "
        "split for sources in which every token counts, else whole (auto).",
    ),
    Flag(
        "buckets",
        value="N,N",
        help="Shorter lengths of rows, such as 128,256: all rows of a batch have the shortest of "
        "these lengths into which they fit, or that of --sequence_length; for --packing=single and "
        "whole; default: the model's, none.",
    ),
    Flag("batch_size", int, least=1, help="Rows of a batch; default: the model's."),
    Flag(
        "sequence_length",
        int,
        least=2,
        help="Tokens of a row, limited by the model; default: the model's.",
    ),
    Flag(
        "lora_rank",
        int,
        least=0,
        help="Train adapters of this rank (LoRA) in place of the weights; 0: none; "
        "default: the model's.",
    ),
    Flag(
        "lora_alpha",
        float,
        help="Factor of adapters' products, over the rank; default: 16.",
    ),
    Flag("lora_dropout", float, help="Dropout rate of adapters' inputs; default: 0."),
    Flag(
        "lora_targets",
        value="PATTERN",
        help="Weights that have adapters, a regular expression; default: attention/w_[qv].",
    ),
    Flag(
        "vocab_size",
        int,
        least=2,
        help="Tokens of a vocabulary that is learned from the training data; default: the model's.",
    ),
    Flag(
        "vocab_multiple",
        int,
        help="Pad the tokens of each device to a multiple of this, such as 128; default: the "
        "model's, 1.",
    ),
)
ATTRIBUTES = frozenset(flag.name for flag in ATTRIBUTE_FLAGS)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of a model, and how text is spelled in them."""

    # Ids of a text that is to be continued, or a SourcePrompt of a text that is the source.
    encode: Callable[[str], Any]
    decode: Callable[[Sequence[int]], str]
    # Ids that end a text.
    stop: frozenset[int]
    # The most tokens of a text.
    length: int
    vocab_size: int
    # The most tokens of a source, for models that read one.
    source_length: int | None = None

    def text(self, prompt: Sequence[int] | SourcePrompt, tokens: Sequence[int]) -> str:
        """Returns a prompt and its continuation as text, without the token that ends it; of a
        prompt with a source only the continuation.
        """
        said = tokens[:-1] if tokens and tokens[-1] in self.stop else tokens
        return self.decode(said if isinstance(prompt, SourcePrompt) else [*prompt, *said])


class Texts(NamedTuple):
    """A model that continues or scores texts."""

    subject: Any
    # The checkpoint.
    path: str
    tokens: Tokens
    batch_size: int


class ModelKind(abc.ABC):
    """A kind of models: its flags, and what commands make of them."""

    # Flags of a training, and those that only commands on texts have.
    flags: tuple[Flag, ...]
    text_flags: tuple[Flag, ...] = ()

    @abc.abstractmethod
    def logdir(self) -> str:
        """Returns the folder of checkpoints."""

    @abc.abstractmethod
    def training(self) -> contextlib.AbstractContextManager[tuple[Any, Options]]:
        """Holds the log directory; gives the trainer and the options of the flags."""

    @abc.abstractmethod
    def evaluation(self) -> tuple[Any, str]:
        """Returns the model, and the path of the checkpoint to evaluate."""

    def takes(self, command: str) -> Collection[str]:
        """Returns flags of a training that `decode`, `score` or `export` has for this kind."""
        return ()

    def texts(self, command: str, texts: Sequence[str]) -> Texts:
        """Returns the model for `decode`, `score` or `export`, which has no texts."""
        raise CheckpointError(f"models of {type(self).__module__} continue no texts")


class RegisteredKind(ModelKind):
    """The registered models of lingvo."""

    flags = (
        *grouped(
            FILES,
            Flag(
                "model",
                short="m",
                help="The model: package.module.Class, a SingleTaskModelParams of lingvo; the "
                "folder that the command is called in is searched first.",
            ),
            *training_flags.plan_flags(),
            Flag(
                "seed",
                int,
                0,
                help="Seed for initial weights and random ops; ignored if the task sets "
                "random_seed.",
            ),
            *training_flags.FILTER_FLAGS,
            Flag(
                "dataset",
                help="The dataset to evaluate on; default: Dev, or else Test, if the model has it.",
            ),
        ),
        *ATTRIBUTE_FLAGS,
        *training_flags.training_flags(),
        *learning_flags.LEARNING_FLAGS,
    )

    def logdir(self) -> str:
        """Returns `--logdir`, or a folder named after the model."""
        return logdir()

    @contextlib.contextmanager
    def training(self) -> Iterator[tuple[Any, Options]]:
        """Makes the trainer, and prints the plan and the changes since the checkpoint."""
        folder = logdir()
        with Folder(folder):
            yield _trainer(folder)

    def evaluation(self) -> tuple[Any, str]:
        """Returns the model, and the path of the checkpoint to evaluate."""
        path = checkpoint_of(logdir())
        check_note(Manifest.read(path).note, os.path.dirname(path) or ".")
        return subject(), path


def _trainer(folder: str) -> tuple[Any, Options]:
    remove_unfinished(folder, CONFIG_FILE)
    path, manifest = newest_whole(folder) or (None, None)
    if manifest:
        check_note(manifest.note, folder)
    model = subject()
    flags = training_flags.saved_flags()
    name = training_flags.microbatch_flag()
    if name and FLAGS.is_given(name) and model.has_actions():
        try:
            # Before the first step, which is what finds it for a model's own number.
            model.check_batch()
        except PlanError as error:
            raise FlagError(f"--{name}={FLAGS.value(name)}: {error}") from error
    if model.most_steps is not None:
        if not FLAGS.is_given("steps"):
            FLAGS.set("steps", model.most_steps, given=False)
        elif FLAGS.steps != model.most_steps:
            print(f"--steps={FLAGS.steps} in place of p.train.max_steps={model.most_steps}")
    model.learning.check_steps(FLAGS.steps)
    options = Options(logdir=folder, given=flags, **training_flags.options())
    with console.waiting("making the model"):
        from pipemesh.training.trainer import Trainer

        model.given = flags
        now = model.note()
        there: Any = manifest.note if manifest else {}
        place = _settings(there, "input.") == _settings(now, "input.")
        try:
            trainer = Trainer(model, options, restore=path, keeps_place=place)
        except CheckpointError as error:
            was, own = (
                note.get("settings", {}).get(_OPTIMIZER, "").rpartition("/")[2]
                for note in (there, now)
            )
            if was in ("", own) or there.get(WEIGHTS_ONLY):
                raise
            raise CheckpointError(f"{path} was trained by {was}, not {own}: {error}") from error
    plan = model.plan
    print(f"{model.name}: {plan.mesh}")
    if table := trainer.stage_table():
        print(f"plan: {plan}\n{table}")
    for counts in model.data_counts():
        print(f"data: {counts}")
    for counts in model.data_counts(heldout=True):
        print(f"held-out data: {counts}")
    print(f"evaluation while training: {trainer.sample}")
    if manifest:
        print(f"going on from {trainer.restored}")
        for line in _changes(there, now):
            print(line)
        if not trainer.keeps_place:
            print("the data is read from its beginning")
    elif not trainer.batches.is_restorable:
        print(
            "the position in this data cannot be saved: a resumed run reads it from its beginning"
        )
    return trainer, options


def _settings(note: Any, prefix: str) -> dict[str, str]:
    settings = note.get("settings", {})
    return {name: value for name, value in settings.items() if name.startswith(prefix)}


_OPTIMIZER = "task.train.learner.optimizer.cls"
# The name of a param of a layer of a stack.
_OF_A_LAYER = re.compile(r"(.*)\.cell_tpl\[(\d+)\]\.sub\[(\d+)\](.*)")
# One of a stage, whose layers have theirs.
_OF_A_STAGE = re.compile(r"\.cell_tpl\[\d+\]\.(?!sub\[)")
# Settings that an import does not have: data, learning, adapters.
_OF_A_RUN = re.compile(r"^input\.|^task\.train\.|\.adapted$|\.adapter_tpl\.")


def _changes(there: Any, now: Any) -> list[str]:
    """Lists the differences from a checkpoint's note, one per line."""
    from pipemesh.layers.pipeline.stack_plan import PARAMS

    values = {param: name for name, param in PARAMS.items()}
    values |= {"mesh_shape": "mesh", "layout": "layout"}
    plan = _differences(there.get("plan", {}), now["plan"])
    changes = list(plan.items())
    settings, own = (_by_layer(note.get("settings", {})) for note in (there, now))
    for name, (before, after) in _differences(settings, own).items():
        if _OF_A_STAGE.search(name) and not (name in settings and name in own):
            # The plan has another number of stages.
            continue
        if there.get(WEIGHTS_ONLY) and _OF_A_RUN.search(name):
            continue
        if name not in settings and after == "False":
            # A switch that was added since, and is off.
            continue
        # A stack's params repeat the plan, or are empty where the class leaves them out.
        old, new = plan.get(values.get(name.rpartition(".")[2], ""), (None, None))
        if _as_in_plan(before) != old and _as_in_plan(after) != new:
            changes.append((name, (before, after)))
    return [f"changed since the checkpoint: {name} {a} -> {b}" for name, (a, b) in changes]


def _by_layer(settings: Mapping[str, str]) -> dict[str, str]:
    """Returns settings in which layers have their numbers in the stack: another plan cuts other
    stages, and a layer that only moves has not changed.
    """
    found = filter(None, map(_OF_A_LAYER.fullmatch, settings))
    layers = sorted({(each[1], int(each[2]), int(each[3])) for each in found})
    numbers: dict[tuple[str, int, int], int] = {}
    for _, of_stack in itertools.groupby(layers, key=operator.itemgetter(0)):
        numbers.update((layer, number) for number, layer in enumerate(of_stack))

    def by_number(name: re.Match[str]) -> str:
        return f"{name[1]}.layers[{numbers[name[1], int(name[2]), int(name[3])]}]{name[4]}"

    return {_OF_A_LAYER.sub(by_number, name): value for name, value in settings.items()}


def _as_in_plan(text: str) -> str:
    return "none" if text in ("''", "NoneType") else text.strip("'")


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns the old and the new value of each name as texts where they differ."""
    pairs = {n: (str(old.get(n) or "none"), str(new.get(n) or "none")) for n in {**old, **new}}
    return {name: (a, b) for name, (a, b) in pairs.items() if _compared(a) != _compared(b)}


def _compared(text: str) -> str:
    """Returns a value without what may differ between releases: the module of a class of this
    library, and whether there is a param that is None.
    """
    if text == "NoneType":
        return "none"
    return text.rpartition("/")[2] if text.startswith("type/pipemesh.") else text


def logdir() -> str:
    """Returns the folder of checkpoints."""
    if FLAGS.logdir:
        return FLAGS.logdir
    if FLAGS.logdir == "" or not FLAGS.model:
        raise FlagError(
            "cannot tell which model to use; pass --model=package.module.Class, or the --logdir of "
            "a training to resume"
        )
    return os.path.join("runs", FLAGS.model.rpartition(".")[2])


def subject() -> Any:
    """Returns the model of the flags, and starts TensorFlow with the devices of its plan."""
    if not FLAGS.model:
        raise FlagError(
            f"cannot tell which model to use: no checkpoint in --logdir={FLAGS.logdir!r}; pass "
            "--model=package.module.Class"
        )
    check_seed(FLAGS.seed)
    # Before TensorFlow is loaded.
    learning_flags.given()
    values = training_flags.plan_values()
    if FLAGS.plain:
        mesh = Mesh.from_text(values.setdefault("mesh", "layers:1"))
        training_flags.check_plain(mesh.num_devices, FLAGS.compute_dtype)
    with console.waiting("loading TensorFlow"):
        workers.accept_lingvo_flags()
        from pipemesh.training.registered import (
            RegisteredModel,
            batch_sizes,
            find_model,
            mesh_before,
        )

        def new() -> Any:
            config = find_model(FLAGS.model)()
            take_flags(config, FLAGS, logdir())
            set_attributes(config, learning_flags.given())
            # Task() may set p.train.max_steps, which is the end.
            fall_later(config)
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
                compile=FLAGS.compile,
                freeze=FLAGS.freeze,
                train_only=FLAGS.train_only,
                dataset=FLAGS.dataset,
            )

        config = new()
        try:
            mesh = mesh_before(config, values)
            if mesh is not None:
                _start(mesh)
            # Only now: data may be read with TensorFlow.
            values |= training_flags.microbatches_of(lambda: batch_sizes(config))
            model = made(config, values)
        except (LayoutError, MeshError, PlanError, ScheduleError) as error:
            if training_flags.value_of(error) in values:
                raise training_flags.error_of(error, values) from error
            raise FlagError(f"--model={FLAGS.model!r}: {error}") from error
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

        if workers.fitting(model.plan, model.device_type, check) != model.plan:
            model = other["model"]
        own = None if FLAGS.is_given("steps") else model.most_steps
        steps = FLAGS.steps if own is None else own
        model.learn(learning_flags.with_end(find_model(FLAGS.model), steps))
        training_flags.check_memory(model.plan, logdir())
        from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip
        from lingvo.core import py_utils

        py_utils.SetEagerMode(True)
    return model


def take_flags(config: Any, flags: Flags, folder: str, names: Collection[str] = ATTRIBUTES) -> None:
    """Sets the attributes of an instance of --model that flags set, and the log directory."""
    if hasattr(config, _LOGDIR):
        setattr(config, _LOGDIR, folder)
    for flag in ATTRIBUTE_FLAGS:
        name, value = flag.name.upper(), flags.value(flag.name)
        if value is None or flag.name not in names:
            continue
        if not hasattr(config, name):
            raise FlagError(
                f"--{flag.name}={value}: {flags.model} has no attribute {name} that would take it; "
                "leave it out"
            )
        setattr(config, name, value)


def _start(mesh: Mesh) -> None:
    workers.start_tensorflow(mesh, workers.device_type(mesh.num_devices))


def check_note(note: Mapping[str, Any], folder: str) -> None:
    """Checks that a checkpoint is of a registered model, and of the one that the flags name."""
    there = note.get("model")
    if not isinstance(there, str):
        program = note.get("program", "another program")
        raise CheckpointError(
            f"--logdir={folder!r} holds a checkpoint of {program}; use that, or another --logdir"
        )
    if FLAGS.model and not same_class(there, FLAGS.model):
        raise CheckpointError(
            f"--logdir={folder!r} holds a checkpoint of another model ({there}, not "
            f"{FLAGS.model}); give another --logdir"
        )


def check_flags() -> None:
    """Checks the flags of an evaluation, and sets --logdir by --checkpoint."""
    if FLAGS.figures is not None and FLAGS.device_memory is None:
        raise FlagError("--figures is for --device_memory here; give that, or leave it out")
    if FLAGS.checkpoint and not FLAGS.logdir:
        FLAGS.set("logdir", os.path.dirname(FLAGS.checkpoint) or ".", given=False)


def checkpoint_of(folder: str) -> str:
    """Returns the path of the checkpoint to evaluate, and holds it."""
    path = FLAGS.checkpoint or hold_newest(folder)
    if path is None:
        raise CheckpointError(f"--logdir={folder!r} has no checkpoint; train first")
    if FLAGS.checkpoint:
        # As of the newest one, a training in the same folder would let go of it.
        hold(path)
    Manifest.read(path).check(path)
    return path


def note_of(argv: Sequence[str]) -> Mapping[str, Any]:
    """Returns the note of the checkpoint that a command line names, before flags are parsed."""
    flags = named(argv)
    if path := flags.get("checkpoint"):
        return Manifest.read(str(path)).note
    return training_flags.newest_note(str(flags["logdir"]))[1] if "logdir" in flags else {}


def named(argv: Sequence[str]) -> dict[str, Any]:
    """Returns the flags of a command line by name, before they are parsed."""
    flags: dict[str, Any] = {}
    for word, after in itertools.zip_longest(argv[1:], argv[2:], fillvalue=""):
        name, separator, value = word.lstrip("-").partition("=")
        if word.startswith("-"):
            flags[name.replace("-", "_")] = value if separator else after
    if CONFIG in flags:
        # Parsing the flags reports an invalid value.
        with contextlib.suppress(ConfigError):
            flags = {**read_toml(flags[CONFIG]), **flags}
    return flags


def kind_called(name: str) -> ModelKind:
    """Returns the kind that a checkpoint's note names by its module."""
    try:
        module: Any = import_model_module(name)
    except ModuleNotFoundError as error:
        if not is_missing(name, error):
            raise
        raise CheckpointError(
            f"the checkpoint is of {name}, and there is no module {error.name!r} here; call from "
            "the folder in which the package lies, or put that folder on PYTHONPATH"
        ) from error
    return module.KIND


REGISTERED = RegisteredKind()
"""The kind of models that note no other one."""
