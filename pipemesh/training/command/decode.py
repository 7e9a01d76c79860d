"""Continues texts with a trained language model.

    pipemesh decode --logdir=runs/OneBillionWordTiny --prompt="The module" --max_tokens=24

Standard output has the texts and nothing else. The plan may be another than that of the training.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

from absl import flags

from pipemesh.decoding_limits import check_beams, check_sampling
from pipemesh.errors import CheckpointError, DecodingError
from pipemesh.training.command import given_texts, model_flags, quiet, training_flags
from pipemesh.training.command.evaluate import (
    define_checkpoint,
    named,
    note_of,
    program_called,
)
from pipemesh.training.command.flags import TEXTS, FlagError, group, is_help, show_help
from pipemesh.training.run import console

FLAGS = flags.FLAGS

# Flags that are defined here belong to the program that asks for them.
flags.disclaim_key_flags()

# What decoding takes from its own flags alone, not from those that the training was begun with:
# other stages are cut elsewhere, and what was trained as one program is decoded stage by stage.
OWN = (
    *("num_microbatches", "remat", "schedule", "strict_devices", "trace_schedule"),
    *("find_learning_rate", "boundaries", "lowering"),
)
# Prompts a group, at most, where nobody says how many.
_MOST_ROWS = 16


def main(argv: list[str]) -> int:
    """Decodes as the flags say.

    Args:
        argv: the program and its arguments.

    Returns:
        The exit code.

    Raises:
        PipemeshError: what is asked for cannot be had.
    """
    quiet.install()
    if helped(argv, __doc__, define, given_texts.TAKEN):
        return 0
    return program_of(argv).main(argv)


def program_of(argv: list[str]) -> ModuleType:
    """The module that continues and scores texts with the checkpoint that a command line names.

    Args:
        argv: the program and its arguments.

    Raises:
        CheckpointError: it is of a model that does neither, or that is not here.
        FlagError: there is none.
    """
    note = note_of(argv)
    if not note:
        if "logdir" in (given := named(argv)):
            raise CheckpointError(
                f"--logdir={given['logdir']!r} has no checkpoint; train first, or give another"
            )
        raise FlagError("which training? give the --logdir of one, or a --checkpoint")
    program = note.get("decoded_by")
    if program is None:
        raise CheckpointError(
            f"the checkpoint is of {note.get('model') or note.get('program', 'another program')}, "
            "which says nothing of decoding: it continues no text, or was trained before it could; "
            "pipemesh predict says what it makes of held-out examples"
        )
    return program_called(program)


def helped(
    argv: list[str], about: str | None, define: Callable[[], None], taken: Collection[str]
) -> bool:
    """Prints help if it is asked for and no checkpoint says which program answers it.

    Args:
        argv: the program and its arguments.
        about: what help begins with.
        define: defines the flags of the command.
        taken: flags that it takes besides, of those that all models share.

    Returns:
        Whether it was printed.
    """
    if not is_help(argv) or note_of(argv):
        return False
    before = set(FLAGS)
    define()
    own = set(FLAGS) - before
    for each in (model_flags.define, training_flags.define, define_checkpoint):
        each()
    show_help(str(about), own.union(taken).intersection(FLAGS), required=["logdir"])
    return True


@group(TEXTS)
def define() -> None:
    """Defines the flags of decoding."""
    flags.DEFINE_string("prompt", None, "The text to continue.")
    flags.DEFINE_string(
        "file",
        None,
        "A file of texts to continue, one a line, or FILE.jsonl with a string of JSON a line; "
        "blank lines are left out; - for the input.",
    )
    flags.DEFINE_integer("max_tokens", 24, "Add so many tokens to a text at most.", lower_bound=1)
    flags.DEFINE_float(
        "temperature",
        0.0,
        "0 takes the most likely token, 1 draws by what the model says.",
    )
    flags.DEFINE_integer("top_k", 0, "Draw from so many of the most likely tokens; 0 for all.")
    flags.DEFINE_float("top_p", 1.0, "Draw from the most likely tokens of this probability.")
    flags.DEFINE_integer(
        "beams",
        None,
        "Search the likeliest text, so many beginnings at a time.",
        lower_bound=1,
    )
    flags.DEFINE_float(
        "length_penalty",
        1.0,
        "Of a search: texts of n tokens have their log probability divided by n to this power.",
        lower_bound=0.0,
    )
    flags.DEFINE_integer(
        "sample_seed",
        0,
        "Seed of what is drawn; with the same one it is the same under any plan.",
    )
    flags.DEFINE_integer(
        "groups",
        None,
        "Groups of texts under way; default: one a stage.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "rows",
        None,
        f"Texts a group, or fewer if there are not so many; default: {_MOST_ROWS}, by --beams.",
        lower_bound=1,
    )
    flags.DEFINE_enum(
        "format",
        "text",
        ["text", "json"],
        "Texts, or a line of JSON for each, with probabilities.",
    )
    flags.DEFINE_bool(
        "stream",
        None,
        "Print text as it comes; default: on a terminal, unless it is searched or JSON.",
    )


@dataclasses.dataclass(frozen=True)
class Tokens:
    """How a model spells text.

    Attributes:
        encode: ids of a text that is to be continued.
        decode: the text of ids.
        stop: ids that end a text.
        length: tokens that a text has at most.
        vocab_size: ids are below it.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    stop: frozenset[int]
    length: int
    vocab_size: int

    def text(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """The text of a prompt and what follows it, without the token that ends it."""
        said = tokens[:-1] if tokens and tokens[-1] in self.stop else tokens
        return self.decode([*prompt, *said])


def asked() -> list[str]:
    """Checks the values of flags without TensorFlow, and returns the texts.

    Raises:
        PipemeshError: a value is out of its range, or there is no text.
    """
    _settings(check_sampling, check_beams)
    _streams()
    return given_texts.read("continued")


def decode(subject: Any, path: str, tokens: Tokens, texts: Sequence[str]) -> None:
    """Continues texts, and prints them in their order.

    Args:
        subject: the model.
        path: of the checkpoint.
        tokens: how it spells text.
        texts: to be continued.

    Raises:
        PipemeshError: a text cannot be continued, or the checkpoint is another model's.
    """
    from pipemesh.decoding import BeamSearch, Decoder, Sampler, generator_of
    from pipemesh.training.command.streaming import Stream
    from pipemesh.training.evaluation import restored

    console.output_matters()
    chooser, streams = _settings(Sampler, BeamSearch), _streams()
    ids = [tokens.encode(text) for text in texts]
    with console.waiting("making the model"):
        trained = restored(subject, path)
    if len(trained.pipelines) != 1:
        raise DecodingError(f"{subject.name} has {len(trained.pipelines)} pipelines, not one")
    generator = generator_of(
        trained.task,
        trained.pipelines[0],
        lambda: trained.cluster(do_eval=True),
        tokens.length,
        chooser,
        tokens.stop,
    )
    groups, rows = _sizes(subject.plan, generator, len(ids))
    stream = Stream(tokens, ids, FLAGS.max_tokens)
    decoder = Decoder(
        generator,
        groups=groups,
        rows=rows,
        length=tokens.length,
        vocab_size=tokens.vocab_size,
        seed=FLAGS.sample_seed,
        **({"steps": 1, "watch": stream.take} if streams else {}),
    )
    for number, prompt in enumerate(ids, 1):
        # Before the first of them.
        decoder.check(prompt, FLAGS.max_tokens, number)
    found = _in_order(decoder.generate(ids, FLAGS.max_tokens))
    if streams:
        # What is said comes from the stream.
        collections.deque(found, maxlen=0)
        return
    with console.waiting("decoding"):
        first = next(found)
    for each, text, prompt in zip(itertools.chain([first], found), texts, ids, strict=True):
        print(_told(each, text, prompt, tokens), flush=True)


def _sizes(plan: Any, generator: Any, number: int) -> tuple[int, int]:
    """How many groups there are for so many prompts, and rows in each.

    Raises:
        FlagError: rows cannot be split as the batch is.
    """
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


def _told(found: Any, text: str, prompt: Sequence[int], tokens: Tokens) -> str:
    """A continuation as it is printed."""
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


def json_number(value: float) -> float | None:
    """A number as JSON has it, which knows no infinity."""
    return round(value, 6) if math.isfinite(value) else None


def line_of(values: Any) -> str:
    """A line of JSON, in characters that standard output has."""
    return json.dumps(values, ensure_ascii=not console.has_unicode())


def _settings(drawn: Callable[..., Any], searched: Callable[..., Any]) -> Any:
    """Calls a function with the settings of how tokens are chosen.

    Args:
        drawn: called with temperature, top_k and top_p.
        searched: called with beams and length penalty, if there are beams.

    Raises:
        DecodingError: a value is out of its range.
        FlagError: flags do not go together.
    """
    drawing = [name for name in ("temperature", "top_k", "top_p") if FLAGS[name].present]
    if FLAGS.beams is None:
        if FLAGS["length_penalty"].present:
            raise FlagError("--length_penalty is for a search; give --beams, or leave it out")
        return drawn(FLAGS.temperature, FLAGS.top_k, FLAGS.top_p)
    if drawing:
        raise FlagError(
            f"--beams searches and --{drawing[0]} is for drawing; leave one of them out"
        )
    return searched(FLAGS.beams, FLAGS.length_penalty)


def _streams() -> bool:
    """Whether text is printed as it comes.

    Raises:
        FlagError: it is asked for, and cannot be.
    """
    hinders = [f"--format={FLAGS.format}"] if FLAGS.format != "text" else []
    hinders += ["--beams"] if FLAGS.beams else []
    if FLAGS.stream and hinders:
        raise FlagError(f"--stream prints text as it comes; it does not go with {hinders[0]}")
    return sys.stdout.isatty() and not hinders if FLAGS.stream is None else FLAGS.stream


def _in_order(found: Iterable[Any]) -> Iterator[Any]:
    """As they were given, each as soon as those before it are done."""
    held: dict[int, Any] = {}
    number = 0
    for each in found:
        held[each.number] = each
        while number in held:
            yield held.pop(number)
            number += 1
