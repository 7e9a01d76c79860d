"""Trains the one-billion-word language model.

    python -m models.one_billion_word.train --mesh_shape=layers:2 --steps=300 --logdir=/tmp/lm

Run it again with the same `--logdir` to go on where it stopped.
"""

from __future__ import annotations

import difflib
import math
import os
import signal
import sys
import time
from typing import Any, NoReturn

from absl import app, flags, logging

from pipemesh.errors import PipemeshError
from pipemesh.mesh import Mesh
from pipemesh.schedule import ScheduleSpec
from pipemesh.schedule_names import listing

FLAGS = flags.FLAGS

flags.DEFINE_string("model", "OneBillionWordTiny", "Name of the configuration.", short_name="m")
flags.DEFINE_string("mesh_shape", "layers:2", "Mesh of devices; its axis `layers` has stages.")
flags.DEFINE_enum("device_type", "CPU", ["CPU", "GPU"], "What the devices are.")
flags.DEFINE_integer("num_microbatches", None, "Microbatches a batch; default: the model's.")
flags.DEFINE_integer("batch_size", None, "Rows a batch; default: the model's.")
flags.DEFINE_integer("vocab_size", None, "SentencePiece pieces; default: the model's.")
flags.DEFINE_integer("sequence_length", None, "Tokens a row; default: the model's.")
flags.DEFINE_string(
    "schedule",
    None,
    f"The pipeline schedule: {listing()}; default: the model's.",
)
flags.DEFINE_enum(
    "remat", None, ["full", "none", "except_last"], "What the backward pass computes again."
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
    "trace_schedule",
    False,
    "After training, two more steps that time every action; writes schedule.html and "
    "schedule_trace.json (chrome://tracing) into --logdir, predicted beside measured.",
)
flags.DEFINE_integer("seed", 0, "Seed of weights, data order and dropout.")
flags.DEFINE_integer("eval_every", 100, "Evaluate every so many steps.", lower_bound=1)
flags.DEFINE_integer(
    "eval_batches", None, "Held-out batches to judge by; default: all.", lower_bound=1
)
flags.DEFINE_integer("save_every", 100, "Save every so many steps.", lower_bound=1)

# What a shell reports of a program that was interrupted.
_INTERRUPTED = 130
_BAD_INPUT = 2
# Of the progress bar: in a log file every refresh is a line, on a terminal they are one.
_SECONDS_A_REFRESH = {False: 30.0, True: 1.0}


def main(arguments: list[str]) -> None:
    """Runs, and turns what users can mend into one line."""
    if len(arguments) > 1:
        _fail(f"{arguments[1]!r} is no flag; flags begin with --")
    if not FLAGS["verbosity"].present:
        logging.set_verbosity(logging.ERROR)
    try:
        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except (PipemeshError, OSError) as error:
        _fail(str(error))


def parse_flags(argv: list[str]) -> list[str]:
    """Parses the command line; a bad one ends the program as other bad input does."""
    try:
        return FLAGS(argv)
    except flags.Error as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(_BAD_INPUT)


def run() -> int:
    """Trains as the flags say; returns the exit code."""
    mesh = _mesh()
    _start_devices(mesh.num_devices)
    # Only now: TensorFlow reads the number of devices and threads when it starts.
    from models.one_billion_word.checkpoint import check_identity
    from models.one_billion_word.corpus import load_corpus
    from models.one_billion_word.vocabulary import load_vocabulary

    config = _config(mesh)
    corpus = load_corpus(FLAGS.data_dir, FLAGS.train_pattern, FLAGS.heldout_pattern)
    logdir = FLAGS.logdir or os.path.join("runs", FLAGS.model)
    check_identity(logdir, config)
    vocabulary = load_vocabulary(corpus, config.VOCAB_SIZE, os.path.join(logdir, "vocabulary"))

    from lingvo.core import py_utils

    from models.one_billion_word.stage_table import stage_table
    from models.one_billion_word.trainer import Trainer

    py_utils.SetEagerMode(True)
    trainer = Trainer(
        config, corpus, vocabulary, mesh, FLAGS.device_type, logdir, FLAGS.eval_batches
    )
    print(
        f"{FLAGS.model} on {corpus.name}: {mesh}, {config.NUM_MICRO_BATCHES} microbatches of "
        f"{config.BATCH_SIZE // config.NUM_MICRO_BATCHES} x {config.SEQUENCE_LENGTH} tokens"
    )
    print(stage_table(config, trainer.task, trainer.devices), flush=True)
    if trainer.restored:
        print(f"going on from {trainer.saved}")
    return _Loop(trainer, corpus, vocabulary, logdir).run(FLAGS.steps)


def _mesh() -> Mesh:
    try:
        mesh = Mesh.from_text(FLAGS.mesh_shape)
    except PipemeshError as error:
        raise PipemeshError(f"--mesh_shape={FLAGS.mesh_shape!r}: {error}") from error
    other = [name for name, size in mesh.axes if name != "layers" and size > 1]
    if other:
        raise PipemeshError(
            f"--mesh_shape={FLAGS.mesh_shape!r}: axis {other[0]!r} is not supported by this model; "
            "use the axis 'layers' alone, for example 'layers:2'"
        )
    return mesh


def _start_devices(num_devices: int) -> None:
    import tensorflow as tf

    from pipemesh.lowering.devices import start_cpu_devices

    if FLAGS.device_type == "CPU":
        start_cpu_devices(num_devices)
    elif num_devices > (found := len(tf.config.list_physical_devices("GPU"))):
        raise PipemeshError(
            f"--mesh_shape={FLAGS.mesh_shape!r} needs {num_devices} GPUs, but {found} exist; use a "
            "smaller mesh or --device_type=CPU"
        )


def _config(mesh: Mesh) -> Any:
    """The named configuration with what the flags change."""
    from models.one_billion_word.params import CONFIGURATIONS

    if FLAGS.model not in CONFIGURATIONS:
        near = difflib.get_close_matches(FLAGS.model, CONFIGURATIONS, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise PipemeshError(
            f"--model={FLAGS.model!r} is unknown{hint} Models are {', '.join(CONFIGURATIONS)}"
        )
    config = CONFIGURATIONS[FLAGS.model]()
    for flag, attribute in (
        ("num_microbatches", "NUM_MICRO_BATCHES"),
        ("batch_size", "BATCH_SIZE"),
        ("vocab_size", "VOCAB_SIZE"),
        ("sequence_length", "SEQUENCE_LENGTH"),
        ("schedule", "SCHEDULE"),
        ("remat", "REMAT"),
        ("compute_dtype", "COMPUTE_DTYPE"),
        ("learning_rate", "LEARNING_RATE"),
    ):
        value = FLAGS[flag].value
        if value is not None:
            if not isinstance(value, str) and not value > 0:
                raise PipemeshError(f"--{flag}={value}: it must be above 0")
            setattr(config, attribute, value)
    config.DATA_DIR = FLAGS.data_dir and os.path.abspath(FLAGS.data_dir)
    config.TRAIN_PATTERN, config.HELDOUT_PATTERN = FLAGS.train_pattern, FLAGS.heldout_pattern
    config.SEED = FLAGS.seed
    config.STRICT_DEVICES = FLAGS.strict_devices
    devices = mesh.size("layers")
    try:
        spec = ScheduleSpec.from_text(config.SCHEDULE)
        stages = spec.build(devices, config.NUM_MICRO_BATCHES).num_stages
    except PipemeshError as error:
        raise PipemeshError(f"--schedule={config.SCHEDULE}: {error}") from error
    if config.BLOCKS_PER_STAGE is not None and len(config.BLOCKS_PER_STAGE) != stages:
        config.BLOCKS_PER_STAGE = None
    config.NUM_STAGES = stages
    if stages > config.NUM_LAYERS + 2:
        raise PipemeshError(
            f"--mesh_shape={FLAGS.mesh_shape!r} and --schedule={config.SCHEDULE!r} ask for "
            f"{stages} stages, but {FLAGS.model} has {config.NUM_LAYERS + 2} layers; use at most "
            f"{config.NUM_LAYERS + 2} stages"
        )
    if config.BATCH_SIZE % config.NUM_MICRO_BATCHES:
        divisors = [n for n in range(1, config.BATCH_SIZE + 1) if config.BATCH_SIZE % n == 0]
        raise PipemeshError(
            f"--num_microbatches={config.NUM_MICRO_BATCHES} does not divide the batch of "
            f"{config.BATCH_SIZE} (--batch_size); it may be {', '.join(map(str, divisors))}"
        )
    return config


class _Loop:
    """Steps, progress, evaluation, summaries and saving."""

    def __init__(self, trainer: Any, corpus: Any, vocabulary: Any, logdir: str) -> None:
        import tensorflow as tf

        self._trainer, self._logdir = trainer, logdir
        self._corpus, self._vocabulary = corpus, vocabulary
        self._stop: int | None = None
        self._rate: float | None = None
        self._write = {
            name: tf.summary.create_file_writer(os.path.join(logdir, name))
            for name in ("train", "heldout")
        }

    def run(self, steps: int) -> int:
        """Trains up to step `steps`, evaluates and saves; returns the exit code."""

        trainer = self._trainer
        old = {s: signal.signal(s, self._request_stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._train(steps)
            if self._stop is not None:
                path = trainer.save()
                name = signal.Signals(self._stop).name
                print(f"{name}: saved {path}; run the same command again to go on", flush=True)
                return _INTERRUPTED
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
        self._conclude()
        if FLAGS.trace_schedule:
            self._trace_schedule()
        return 0

    def _trace_schedule(self) -> None:
        from pipemesh.schedule.render import to_html, to_trace

        predicted, measured = self._trainer.trace_schedule()
        title = f"{FLAGS.model}, milliseconds"
        for name, text in (
            ("schedule.html", to_html(predicted, title=title, measured=measured)),
            ("schedule_trace.json", to_trace(predicted, measured=measured)),
        ):
            path = os.path.join(self._logdir, name)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            print(f"schedule: {path}")
        print(
            f"a step takes {measured.makespan:.0f} ms in the pipeline, predicted from its actions "
            f"{predicted.makespan:.0f} ms; bubble {measured.bubble_ratio:.1%}, predicted "
            f"{predicted.bubble_ratio:.1%}",
            flush=True,
        )

    def _train(self, steps: int) -> None:
        from tqdm import tqdm

        trainer = self._trainer
        with tqdm(
            total=max(steps, trainer.step),
            initial=trainer.step,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            mininterval=_SECONDS_A_REFRESH[sys.stderr.isatty()],
        ) as bar:
            bar.set_postfix_str("building the graph")
            while trainer.step < steps and self._stop is None:
                self._one_step(bar)
                done = trainer.step
                if done % FLAGS.save_every == 0 or done == steps:
                    trainer.save()
                if done % FLAGS.eval_every == 0 and done != steps:
                    score = trainer.evaluate(lambda: self._stop is not None)
                    if score is not None:
                        self._summarize_heldout(score)
                        bar.write(f"step {done}: held out {describe(score)}")

    def _request_stop(self, number: int, _frame: Any) -> None:
        if self._stop is not None:
            # The second time without ceremony.
            raise KeyboardInterrupt
        self._stop = number

    def _one_step(self, bar: Any) -> None:
        begin = time.perf_counter()
        result = self._trainer.train_step()
        seconds = time.perf_counter() - begin
        score = result["score"]
        values = {
            "loss": result["loss"],
            "learning_rate": result["learning_rate"],
            "word_perplexity": score.word_perplexity,
            "bits_per_byte": score.bits_per_byte,
        }
        shown = f"loss {result['loss']:.3f}, word ppl {_short(score.word_perplexity)}"
        if self._rate is None:
            # The first step builds the graph; its time says nothing of those to come.
            self._rate = 0.0
        else:
            now = score.tokens / seconds
            values["tokens_per_second"] = now
            self._rate = 0.9 * self._rate + 0.1 * now if self._rate else now
            shown += f", {self._rate:,.0f} tokens/s"
        self._summarize("train", **values)
        bar.set_postfix_str(shown, refresh=False)
        bar.update()

    def _summarize_heldout(self, score: Any) -> None:
        self._summarize(
            "heldout",
            loss=score.nats / score.tokens,
            bits_per_byte=score.bits_per_byte,
            token_perplexity=score.token_perplexity,
            word_perplexity=score.word_perplexity,
        )

    def _summarize(self, name: str, **values: float) -> None:
        import tensorflow as tf

        with self._write[name].as_default(step=self._trainer.step):
            for key, value in values.items():
                tf.summary.scalar(key, value)
        self._write[name].flush()

    def _conclude(self) -> None:
        from models.one_billion_word.unigram import fit_unigram

        score = self._trainer.evaluate()
        unigram = fit_unigram(self._corpus.train, self._vocabulary).score(self._trainer.heldout)
        ratio = score.bits_per_byte / unigram.bits_per_byte
        self._summarize_heldout(score)
        print(f"held out at step {self._trainer.step}: {describe(score)}")
        print(f"smoothed unigram model, same tokens: {describe(unigram)}")
        print(
            f"bits per byte are {100 * abs(1 - ratio):.1f}% {'below' if ratio < 1 else 'above'}"
            " those of the unigram model"
        )
        print(f"checkpoint: {self._trainer.saved}", flush=True)


def describe(score: Any) -> str:
    """Bits per byte and both perplexities of a score."""
    return (
        f"{score.bits_per_byte:.3f} bits/byte, perplexity {_short(score.token_perplexity)} a token "
        f"and {_short(score.word_perplexity)} a word"
    )


def _short(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.1f}" if value < 1e5 else f"{value:.2g}"


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
