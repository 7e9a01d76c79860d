"""Continues texts with a trained language model.

    pipemesh decode --logdir=runs/OneBillionWordTiny --prompt="The module" --max_tokens=24

Standard output has the texts and nothing else. The plan may be another than that of the training.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from absl import flags

from pipemesh.errors import CheckpointError, DecodingError
from pipemesh.training.command import quiet
from pipemesh.training.command.evaluate import note_of
from pipemesh.training.command.flags import FlagError

FLAGS = flags.FLAGS

# Flags that are defined here belong to the program that asks for them.
flags.disclaim_key_flags()

# Flags of a training that decoding does not depend on.
OF_TRAINING = (
    "lowering",
    "num_microbatches",
    "remat",
    "schedule",
    "strict_devices",
    "trace_schedule",
    "find_learning_rate",
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
    if {"--help", "-h", "-help", "--helpfull", "--helpshort"} & set(argv[1:]):
        # Those that all models share.
        define()
        print(f"{__doc__}\n{FLAGS.module_help(sys.modules[__name__])}")
        return 0
    note = note_of(argv)
    if not note:
        raise FlagError("which training? give the --logdir of one, or a --checkpoint")
    program = note.get("decoded_by")
    if program is None:
        raise CheckpointError(
            f"the checkpoint is of {note.get('model') or note.get('program', 'another program')}, "
            "which says nothing of decoding: it continues no text, or was trained before it could"
        )
    return importlib.import_module(program).main(argv)


def define() -> None:
    """Defines the flags of decoding."""
    flags.DEFINE_string("prompt", None, "The text to continue.")
    flags.DEFINE_string("file", None, "A file of texts to continue, one a line; - for the input.")
    flags.DEFINE_integer("max_tokens", 24, "Add so many tokens to a text at most.", lower_bound=1)
    flags.DEFINE_float(
        "temperature", 0.0, "0 takes the most likely token, 1 draws by what the model says."
    )
    flags.DEFINE_integer("top_k", 0, "Draw from so many of the most likely tokens; 0 for all.")
    flags.DEFINE_float("top_p", 1.0, "Draw from the most likely tokens of this probability.")
    flags.DEFINE_integer(
        "sample_seed", 0, "Seed of what is drawn; with the same one it is the same under any plan."
    )
    flags.DEFINE_integer(
        "groups", None, "Groups of texts under way; default: one a stage.", lower_bound=1
    )
    flags.DEFINE_integer(
        "rows",
        None,
        f"Texts a group; default: as many as there are, {_MOST_ROWS} at most.",
        lower_bound=1,
    )
    flags.DEFINE_enum(
        "format", "text", ["text", "json"], "Texts, or a line of JSON for each, with probabilities."
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


def prompts() -> list[str]:
    """The texts that are to be continued.

    Raises:
        FlagError: there is none, or both flags are given.
        OSError: the file cannot be read.
    """
    if (FLAGS.prompt is None) == (FLAGS.file is None):
        raise FlagError("what is to be continued? give either --prompt or --file")
    if FLAGS.prompt is not None:
        if not FLAGS.prompt:
            raise FlagError("--prompt='' is empty; give some text")
        return [FLAGS.prompt]
    try:
        if FLAGS.file == "-":
            lines = sys.stdin.read().split("\n")
        else:
            with open(FLAGS.file, encoding="utf-8", newline="\n") as file:
                lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FlagError(f"--file={FLAGS.file!r} cannot be read ({reason})") from error
    lines = lines[:-1] if lines[-1] == "" else lines
    if not lines:
        raise FlagError(f"--file={FLAGS.file!r} is empty; give a text a line")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise FlagError(f"--file={FLAGS.file!r}: line {number} is empty; give some text")
    return lines


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
    from pipemesh.decoding import Decoder, Generator, Sampler
    from pipemesh.training.evaluation import restored
    from pipemesh.training.run import console

    sampler = Sampler(FLAGS.temperature, FLAGS.top_k, FLAGS.top_p)
    ids = [tokens.encode(text) for text in texts]
    with console.waiting("making the model"):
        trained = restored(subject, path)
    if len(trained.pipelines) != 1:
        raise DecodingError(f"{subject.name} has {len(trained.pipelines)} pipelines, not one")
    generator = Generator(
        trained.task,
        trained.pipelines[0],
        lambda: trained.cluster(do_eval=True),
        tokens.length,
        sampler,
    )
    plan = subject.plan
    groups = min(FLAGS.groups or plan.num_stages * plan.num_replicas, len(ids))
    decoder = Decoder(
        generator,
        groups=groups,
        rows=FLAGS.rows or min(-(-len(ids) // groups), _MOST_ROWS),
        length=tokens.length,
        vocab_size=tokens.vocab_size,
        stop=tokens.stop,
        seed=FLAGS.sample_seed,
    )
    for number, prompt in enumerate(ids, 1):
        # Before the first of them.
        decoder.check(prompt, FLAGS.max_tokens, number)
    found = _in_order(decoder.generate(ids, FLAGS.max_tokens))
    with console.waiting("decoding"):
        first = next(found)
    for each, text, prompt in zip(itertools.chain([first], found), texts, ids, strict=True):
        print(_told(each, text, prompt, tokens), flush=True)


def _told(found: Any, text: str, prompt: Sequence[int], tokens: Tokens) -> str:
    """A continuation as it is printed."""
    said = found.tokens[:-1] if found.stopped else found.tokens
    whole = tokens.decode([*prompt, *said])
    if FLAGS.format == "text":
        return whole
    values = {
        "prompt": text,
        "text": whole,
        "tokens": list(found.tokens),
        "log_probs": [round(each, 6) for each in found.log_probs],
        "stopped": found.stopped,
    }
    return json.dumps(values, ensure_ascii=False)


def _in_order(found: Iterable[Any]) -> Iterator[Any]:
    """As they were given, each as soon as those before it are done."""
    held: dict[int, Any] = {}
    number = 0
    for each in found:
        held[each.number] = each
        while number in held:
            yield held.pop(number)
            number += 1
