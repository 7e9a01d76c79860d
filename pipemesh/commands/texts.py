"""The commands on texts: `pipemesh decode`, `score` and `export`."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipemesh.checkpoint.files import is_pattern
from pipemesh.commands import process, workers
from pipemesh.commands.flags import (
    FILES,
    FLAGS,
    TEXTS,
    Command,
    Flag,
    FlagError,
    grouped,
    is_help,
    parse,
)
from pipemesh.commands.model_kind import (
    CHECKPOINT_FLAG,
    REGISTERED,
    ModelKind,
    Texts,
    Tokens,
    check_flags,
    kind_called,
    named,
    note_of,
)
from pipemesh.commands.training_flags import OF_PIPELINES, take_up
from pipemesh.decoding_limits import check_beams, check_sampling
from pipemesh.errors import CheckpointError, DecodingError
from pipemesh.training.run import console

_ABOUT_DECODE = """\
Continues texts with a trained language model.

    pipemesh decode --logdir=runs/tiny --prompt="The module" --max_tokens=24

Standard output has the texts and nothing else. The plan may be another than that of the training.
"""

_ABOUT_SCORE = """\
Scores texts with a trained language model.

    pipemesh score --logdir=runs/tiny --file=texts.txt

Standard output has a line for each text: its log probability (natural logarithm), how many tokens
it has, their perplexity, and the text, with tabs between. The first token, which has no score, is
left out. The token that ends a text counts as one of its tokens, unless --noend_token is given. The
plan may be another than that of the training.
"""

_ABOUT_EXPORT = """\
Writes a trained language model as a SavedModel, which TensorFlow loads without this library.

    pipemesh export --logdir=runs/tiny --to=exported

It has the signatures `score` and `decode` (greedy); `pipemesh.decoding.ExportedModel` says what
they take and return.
"""
# Flags of a training that decoding has, too; those of training alone are refused.
TAKEN = (
    *("logdir", "model", "config"),
    *("mesh_shape", "layout", "allow_idle", "boundaries", "lowering", "plain"),
    *("compute_dtype", "device_type"),
    *(name for name in workers.NAMES if name != "elastic"),
)
# Those that `score` takes as well, with `--text` or without.
TAKEN_TO_SCORE = (*TAKEN, "num_microbatches", "schedule", "strict_devices", "compile")
# Help of --logdir, which they need.
_LOGDIR = "Log directory of the training; --checkpoint may stand in its place."
# A file with this ending has a string of JSON a line, which is the text exactly.
_EXACT = ".jsonl"


def parse_for_texts(
    command: str,
    argv: list[str],
    about: str | None,
    flags: tuple[Flag, ...],
    taken: Collection[str],
    why: Mapping[str, str] | None = None,
) -> ModelKind:
    """Parses the command line of `decode`, `score` or `export`; returns the kind of the model.

    `taken` names the flags of a training that the command has, `why` the reasons against others.
    """
    # For help, no checkpoint has to say which kind it is.
    kind = REGISTERED if is_help(argv) and not note_of(argv) else _kind_of(argv)
    takes = {*taken, *kind.takes(command)}
    refused = {
        flag.name: (why or {}).get(flag.name, "is for training")
        for flag in kind.flags
        if flag.name not in takes
    }
    trained = (
        dataclasses.replace(flag, required=True, help=_LOGDIR) if flag.name == "logdir" else flag
        for flag in kind.flags
    )
    of_kind = kind.flags if not is_help(argv) else tuple(trained)
    own = (*flags, CHECKPOINT_FLAG, *(kind.text_flags if command != "export" else ()))
    parse(argv, Command(argv[0], about, (*of_kind, *own), refused=refused))
    check_flags()
    return kind


def model_of(
    kind: ModelKind, command: str, texts: Sequence[str], leave: Collection[str] = ()
) -> Texts:
    """Returns the model of a command on texts; flags but `leave` are taken from its checkpoint."""
    take_up(kind.logdir(), FLAGS.checkpoint, leave, about=None)
    return kind.texts(command, texts)


def restored_model(subject: Any, path: str) -> Any:
    """Returns the task of a subject with the weights of a checkpoint."""
    from pipemesh.training.evaluation import restored

    with console.waiting("making the model"):
        return restored(subject, path)


def scorer_of(subject: Any, trained: Any, rows: int, length: int, vocab_size: int) -> Any:
    """Returns a `Scorer` that computes with a task."""
    from pipemesh.decoding import Scorer
    from pipemesh.training.evaluation import Evaluation

    compute = Evaluation(subject, trained, lambda _, per_example: per_example.xent).outcome
    return Scorer(compute, rows=rows, length=length, vocab_size=vocab_size)


def _kind_of(argv: list[str]) -> ModelKind:
    """Returns the kind of the model that continues and scores texts, by its checkpoint."""
    note = note_of(argv)
    if not note:
        if "logdir" in (flags := named(argv)):
            raise CheckpointError(
                f"--logdir={flags['logdir']!r} has no checkpoint; train first, or give another"
            )
        raise FlagError("no training is named; give the --logdir of one, or a --checkpoint")
    name = note.get("decoded_by")
    if name is None:
        raise CheckpointError(
            f"the checkpoint is of {note.get('model') or note.get('program', 'another program')}, "
            "which says nothing of decoding: it continues no text, or was trained before it could; "
            "pipemesh predict writes its predictions for held-out examples"
        )
    return kind_called(name)


def json_number(value: float) -> float | None:
    """Returns a number for JSON, which knows no infinity."""
    return round(value, 6) if math.isfinite(value) else None


def line_of(values: Any) -> str:
    """Returns a line of JSON, in characters that standard output has."""
    return json.dumps(values, ensure_ascii=not console.has_unicode())


def read_texts(what: str) -> list[str]:
    """Returns the texts of `--prompt` or `--file`, which are to be `continued` or `scored`."""
    if (FLAGS.prompt is None) == (FLAGS.file is None):
        raise FlagError(f"no text to be {what}; give either --prompt or --file")
    if FLAGS.prompt is not None:
        return [_checked(FLAGS.prompt, f"--prompt={FLAGS.prompt!r}")]
    given = f"--file={FLAGS.file!r}"
    try:
        if FLAGS.file == "-":
            content = sys.stdin.buffer.read()
        else:
            with open(FLAGS.file, "rb") as file:
                content = file.read()
        # Not `splitlines`, which takes other characters for ends of lines as well.
        lines = content.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FlagError(f"{given} cannot be read ({reason})") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise FlagError(f"{given} is empty; give a text a line")
    if not FLAGS.file.endswith(_EXACT):
        return [line for _, line in numbered]
    return [_of_json(line, f"{given}: line {number}") for number, line in numbered]


def _of_json(line: str, where: str) -> str:
    try:
        found = json.loads(line)
    except (RecursionError, ValueError) as error:
        raise FlagError(f"{where} is no JSON ({error}); give a string a line") from error
    if not isinstance(found, str):
        raise FlagError(f"{where} is {line[:40]!r}; give a string of JSON")
    return _checked(found, where)


def _checked(text: str, where: str) -> str:
    if not text.strip():
        raise FlagError(f"{where} is empty; give some text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FlagError(f"{where} is not UTF-8; give text that is") from error
    return text


# Flags that are not taken from the training: other stages are cut elsewhere, rows are divided into
# other microbatches, and a model that was trained as one program is decoded stage by stage.
OWN = (
    *("num_microbatches", "remat", "schedule", "strict_devices", "compile", "trace_schedule"),
    *("find_learning_rate", "boundaries", "lowering", "batch_size"),
)


def _text_flags(verb: str, formats: str) -> tuple[Flag, ...]:
    """Returns the flags of texts that are to be continued or scored, and of their output."""
    return (
        Flag("prompt", help=f"The text to {verb}."),
        Flag(
            "file",
            help=f"A file of texts to {verb}, one a line, or FILE.jsonl with a string of JSON a "
            "line; blank lines are left out; - for standard input.",
        ),
        Flag("format", default="text", choices=["text", "json"], help=formats),
    )


# The default of the largest number of prompts in a group.
_MOST_ROWS = 16
DECODE_FLAGS = grouped(
    TEXTS,
    *_text_flags("continue", "Texts, or a line of JSON for each, with probabilities."),
    Flag("max_tokens", int, 24, least=1, help="Maximum number of tokens to add to a text."),
    Flag(
        "temperature",
        float,
        0.0,
        help="0 takes the most likely token, 1 samples from the model's distribution (default: 0).",
    ),
    Flag("top_k", int, 0, help="Sample from this many of the most likely tokens; 0 for all."),
    Flag("top_p", float, 1.0, help="Sample from the most likely tokens of this probability."),
    Flag("beams", int, least=1, help="Beam width; enables beam search."),
    Flag(
        "length_penalty",
        float,
        1.0,
        least=0.0,
        help="With --beams: the log probability of n tokens is divided by n to this power.",
    ),
    Flag(
        "sample_seed",
        int,
        0,
        help="Seed of sampling; the same seed gives the same tokens under any plan.",
    ),
    Flag("groups", int, least=1, help="Groups of texts in flight; default: one per stage."),
    Flag(
        "rows",
        int,
        least=1,
        help=f"Maximum number of texts in a group; default: {_MOST_ROWS}, divided by --beams.",
    ),
    Flag(
        "stream",
        bool,
        help="Print text as it comes; default: on a terminal, unless --beams or JSON.",
    ),
)


def decode(argv: list[str]) -> int:
    """Continues texts as the flags say, and prints them in their order; returns the exit code."""
    process.import_quietly()
    kind = parse_for_texts("decode", argv, _ABOUT_DECODE, DECODE_FLAGS, TAKEN)
    # Before TensorFlow is loaded.
    _settings(check_sampling, check_beams)
    _streams()
    texts = read_texts("continued")
    subject, path, tokens, _ = model_of(kind, "decode", texts, OWN)
    from pipemesh.decoding import BeamSearch, Decoder, Sampler
    from pipemesh.decoding.generator import generator_of

    console.output_matters()
    chooser, streams = _settings(Sampler, BeamSearch), _streams()
    ids = [tokens.encode(text) for text in texts]
    trained = restored_model(subject, path)
    if len(trained.pipelines) != 1:
        raise DecodingError(f"{subject.name} has {len(trained.pipelines)} pipelines, not one")
    generator = generator_of(trained, tokens.length, chooser, tokens.stop)
    groups, rows = sizes_of(subject.plan, generator, len(ids))
    stream = Stream(tokens, ids, FLAGS.max_tokens)
    decoder = Decoder(
        generator,
        groups=groups,
        rows=rows,
        length=tokens.length,
        vocab_size=tokens.vocab_size,
        source_length=tokens.source_length,
        seed=FLAGS.sample_seed,
        **({"steps": 1, "watch": stream.take} if streams else {}),
    )
    for number, prompt in enumerate(ids, 1):
        # Before the first of them.
        decoder.check(prompt, FLAGS.max_tokens, number)
    found = in_order(decoder.generate(ids, FLAGS.max_tokens))
    if streams:
        # The stream prints the text.
        collections.deque(found, maxlen=0)
        return 0
    with console.waiting("decoding"):
        first = next(found)
    for each, text, prompt in zip(itertools.chain([first], found), texts, ids, strict=True):
        print(_continuation_line(each, text, prompt, tokens), flush=True)
    return 0


def sizes_of(plan: Any, generator: Any, number: int) -> tuple[int, int]:
    """Returns the number of groups for this many prompts, and the rows in each."""
    multiple = generator.multiple
    if (FLAGS.rows or multiple) % multiple:
        raise FlagError(
            f"--rows={FLAGS.rows}: as one program for all devices it is split {multiple} ways; "
            f"give a multiple of {multiple}"
        )
    # One program for all has its replicas inside of each group.
    full = plan.num_stages * plan.num_replicas // multiple
    groups = min(FLAGS.groups or full, -(-number // multiple))
    most = FLAGS.rows or max(_MOST_ROWS // generator.chooser.width, 1)
    rows = min(most, -(-number // groups))
    return groups, -(-rows // multiple) * multiple


def _continuation_line(found: Any, text: str, prompt: Sequence[int], tokens: Tokens) -> str:
    """Returns the line of a continuation."""
    whole = tokens.text(prompt, found.tokens)
    if FLAGS.format == "text":
        return whole
    values = {
        "prompt": text,
        "text": whole,
        "tokens": list(found.tokens),
        "log_probs": list(map(json_number, found.log_probs)),
        "stopped": found.stopped,
    }
    if FLAGS.beams:
        # What the search found besides.
        values["others"] = [
            {
                "text": tokens.text(prompt, other.tokens),
                "log_prob": json_number(sum(other.log_probs)),
            }
            for other in found.others
        ]
    return line_of(values)


def _settings(drawn: Callable[..., Any], searched: Callable[..., Any]) -> Any:
    """Calls `drawn` with the settings of sampling, or `searched` with those of a beam search."""
    drawing = [name for name in ("temperature", "top_k", "top_p") if FLAGS.is_given(name)]
    if FLAGS.beams is None:
        if FLAGS.is_given("length_penalty"):
            raise FlagError("--length_penalty is for a search; give --beams, or leave it out")
        return drawn(FLAGS.temperature, FLAGS.top_k, FLAGS.top_p)
    if drawing:
        raise FlagError(
            f"--beams searches and --{drawing[0]} is for drawing; leave one of them out"
        )
    return searched(FLAGS.beams, FLAGS.length_penalty)


def _streams() -> bool:
    """Returns whether text is printed as it comes."""
    hinders = [f"--format={FLAGS.format}"] if FLAGS.format != "text" else []
    hinders += ["--beams"] if FLAGS.beams else []
    if FLAGS.stream and hinders:
        raise FlagError(f"--stream prints text as it comes; it does not go with {hinders[0]}")
    return sys.stdout.isatty() and not hinders if FLAGS.stream is None else FLAGS.stream


def in_order(found: Iterable[Any]) -> Iterator[Any]:
    """Yields results in the order of the prompts, as soon as the earlier ones are done."""
    held: dict[int, Any] = {}
    number = 0
    for each in found:
        held[each.number] = each
        while number in held:
            yield held.pop(number)
            number += 1


# What stands for bytes that are no character yet.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Stream:
    """Prints several texts in their order, each as far as it is known."""

    def __init__(self, tokens: Tokens, prompts: Sequence[Sequence[int]], most: int) -> None:
        self._tokens, self._prompts, self._most = tokens, prompts, most
        self._out = sys.stdout
        self._found: list[list[int]] = [[] for _ in prompts]
        self._now, self._shown = 0, ""

    def take(self, number: int, token: int) -> None:
        """Takes the next token of a text."""
        self._found[number].append(token)
        while self._now < len(self._prompts) and self._found[self._now]:
            if not self._show():
                return
            self._now, self._shown = self._now + 1, ""

    def _show(self) -> bool:
        """Prints what is known of the text that is due; returns whether it is done."""
        found = self._found[self._now]
        done = found[-1] in self._tokens.stop or len(found) == self._most
        text = self._tokens.text(self._prompts[self._now], found)
        # More tokens may change the end: a character may have several.
        sure = text if done else text.rstrip(_UNFINISHED)
        if sure.startswith(self._shown):
            self._out.write(sure[len(self._shown) :])
            self._shown = sure
        elif done:
            self._out.write(f"\n{text}")
        if done:
            self._out.write("\n")
        self._out.flush()
        return done


SCORE_FLAGS = grouped(
    TEXTS,
    *_text_flags("score", "Columns, or a line of JSON for each text, token by token."),
    Flag("end_token", bool, True, help="Count the token that ends a text; default: yes."),
)


def score(argv: list[str]) -> int:
    """Scores texts as the flags say, and prints scores in their order; returns the exit code."""
    process.import_quietly()
    kind = parse_for_texts("score", argv, _ABOUT_SCORE, SCORE_FLAGS, TAKEN_TO_SCORE)
    texts = read_texts("scored")
    subject, path, tokens, rows = model_of(kind, "score", texts)
    console.output_matters()
    ids = [ended(tokens.encode(text), tokens.stop) for text in texts]
    trained = restored_model(subject, path)
    scorer = scorer_of(subject, trained, rows, tokens.length, tokens.vocab_size)
    for number, text in enumerate(ids, 1):
        # Before the first of them.
        scorer.check(text, number)
    for found, text in zip(scorer.score(ids), texts, strict=True):
        print(_score_line(found, text), flush=True)
    return 0


def ended(ids: Sequence[int], stop: Collection[int]) -> list[int]:
    """Returns a text with one end token or none, whether or not the tokenizer adds one."""
    has_end = bool(ids) and ids[-1] in stop
    if not FLAGS.end_token:
        return list(ids[:-1] if has_end else ids)
    return [*ids, *([] if has_end else sorted(stop)[:1])]


def _score_line(found: Any, text: str) -> str:
    if FLAGS.format == "text":
        columns = f"{found.log_prob:.4f}", str(len(found.tokens)), f"{found.perplexity:.4f}", text
        return "\t".join(columns)
    values = {
        "text": text,
        "log_prob": json_number(found.log_prob),
        "perplexity": json_number(found.perplexity),
        "tokens": list(found.tokens),
        "log_probs": list(map(json_number, found.log_probs)),
    }
    return line_of(values)


_OF_PLANS = ("mesh_shape", "layout", "allow_idle", *OF_PIPELINES)
_OF_PLANS += ("strict_devices", "compile", "trace_schedule", *workers.NAMES)
EXPORT_FLAGS = grouped(
    FILES,
    Flag("to", value="FOLDER", help="The folder to write to, new or empty; has to be given."),
    Flag(
        "length",
        int,
        least=2,
        help="Tokens of a row, prompt and continuation together; default: the model's maximum. "
        "Each row is computed at this length, so a shorter one is faster and takes less memory.",
    ),
)


def export(argv: list[str]) -> int:
    """Writes a SavedModel as the flags say, and prints its signatures; returns the exit code."""
    process.import_quietly()
    why = dict.fromkeys(_OF_PLANS, "has no effect, since a model is exported for one device")
    taken = {*TAKEN}.difference(_OF_PLANS)
    kind = parse_for_texts("export", argv, _ABOUT_EXPORT, EXPORT_FLAGS, taken, why)
    _check_folder()
    FLAGS.set("plain", True)
    # Workers in TF_CONFIG are for computations.
    FLAGS.set("cluster", "none", given=False)
    subject, path, tokens, _ = model_of(kind, "export", ())
    import tensorflow as tf

    from pipemesh.decoding import ExportedModel, Sampler
    from pipemesh.decoding.generator import generator_of

    to, length = FLAGS.to, FLAGS.length or tokens.length
    if length > tokens.length:
        raise FlagError(f"--length={length}: the model has {tokens.length} at most; give fewer")
    trained = restored_model(subject, path)

    def compute(batch: Any) -> Any:
        with trained.cluster(do_eval=True):
            return trained.evaluate(batch, lambda _, per_example: per_example.xent)

    generator = generator_of(trained, length, Sampler(), tokens.stop)
    with console.waiting("writing"):
        made = ExportedModel(compute, generator, length=length, vocab_size=tokens.vocab_size)
        try:
            made.save(to)
        except (OSError, tf.errors.OpError) as error:
            raise _unwritable(error) from error
    print(f"{path} is exported to {to}: signatures score and decode, {length} tokens a row")
    return 0


def _check_folder() -> None:
    """Checks that the folder can be made; it is made when there is something to write."""
    if not FLAGS.to:
        raise FlagError("the folder to write to is missing; give --to=FOLDER")
    if is_pattern(FLAGS.to):
        raise FlagError(f"--to={FLAGS.to!r}: TensorFlow loads no model from a path with [ or \\")
    if os.path.exists(FLAGS.to) and (not os.path.isdir(FLAGS.to) or os.listdir(FLAGS.to)):
        raise FlagError(f"--to={FLAGS.to!r} is there already; give a new or an empty folder")
    made, path = [], os.path.abspath(FLAGS.to)
    while not os.path.lexists(path):
        made.append(path)
        path = os.path.dirname(path)
    try:
        os.makedirs(FLAGS.to, exist_ok=True)
        for path in made:
            os.rmdir(path)
    except OSError as error:
        raise _unwritable(error) from error


def _unwritable(error: Exception) -> FlagError:
    why = getattr(error, "strerror", None) or getattr(error, "message", None) or error
    return FlagError(f"--to={FLAGS.to!r} cannot be written to ({why})")
