"""Continues texts with a trained language model.

    pipemesh decode --logdir=runs/tiny --prompt="The module" --max_tokens=24

Standard output has the texts and nothing else. The plan may be another than that of the training.
"""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

from pipemesh.commands import process
from pipemesh.commands.flags import FLAGS, TEXTS, Flag, FlagError, grouped
from pipemesh.commands.model_kind import Texts, Tokens
from pipemesh.commands.texts import (
    TAKEN,
    json_number,
    line_of,
    model_of,
    parse_for_texts,
    read_texts,
)
from pipemesh.decoding_limits import check_beams, check_sampling
from pipemesh.errors import DecodingError
from pipemesh.training.run import console

# Flags that are not taken from the training: other stages are cut elsewhere, and a model that was
# trained as one program is decoded stage by stage.
OWN = (
    *("num_microbatches", "remat", "schedule", "strict_devices", "trace_schedule"),
    *("find_learning_rate", "boundaries", "lowering"),
)
# The default of the largest number of prompts in a group.
_MOST_ROWS = 16
DECODE_FLAGS = grouped(
    TEXTS,
    Flag("prompt", help="The text to continue."),
    Flag(
        "file",
        help="A file of texts to continue, one a line, or FILE.jsonl with a string of JSON a line; "
        "blank lines are left out; - for standard input.",
    ),
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
        "format",
        default="text",
        choices=["text", "json"],
        help="Texts, or a line of JSON for each, with probabilities.",
    ),
    Flag(
        "stream",
        bool,
        help="Print text as it comes; default: on a terminal, unless --beams or JSON.",
    ),
)


def main(argv: list[str]) -> int:
    """Decodes as the flags say; returns the exit code.

    Raises:
        PipemeshError: the request cannot be satisfied.
    """
    process.import_quietly()
    kind = parse_for_texts("decode", argv, __doc__, DECODE_FLAGS, TAKEN)
    texts = requested_texts()
    decode(model_of(kind, "decode", texts, OWN), texts)
    return 0


def requested_texts() -> list[str]:
    """Checks the values of flags without TensorFlow, and returns the texts.

    Raises:
        PipemeshError: a value is out of its range, or there is no text.
    """
    _settings(check_sampling, check_beams)
    _streams()
    return read_texts("continued")


def decode(model: Texts, texts: Sequence[str]) -> None:
    """Continues texts, and prints them in their order.

    Raises:
        PipemeshError: a text cannot be continued, or the checkpoint is another model's.
    """
    from pipemesh.decoding import BeamSearch, Decoder, Sampler, generator_of
    from pipemesh.training.evaluation import restored

    subject, path, tokens, _ = model
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
        # The stream prints the text.
        collections.deque(found, maxlen=0)
        return
    with console.waiting("decoding"):
        first = next(found)
    for each, text, prompt in zip(itertools.chain([first], found), texts, ids, strict=True):
        print(_told(each, text, prompt, tokens), flush=True)


def _sizes(plan: Any, generator: Any, number: int) -> tuple[int, int]:
    """Returns the number of groups for this many prompts, and the rows in each.

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
    """Calls a function with the settings of how tokens are chosen.

    Args:
        drawn: called with temperature, top_k and top_p.
        searched: called with beams and length penalty, if there are beams.

    Raises:
        DecodingError: a value is out of its range.
        FlagError: flags do not go together.
    """
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
    """Returns whether text is printed as it comes.

    Raises:
        FlagError: another flag excludes it.
    """
    hinders = [f"--format={FLAGS.format}"] if FLAGS.format != "text" else []
    hinders += ["--beams"] if FLAGS.beams else []
    if FLAGS.stream and hinders:
        raise FlagError(f"--stream prints text as it comes; it does not go with {hinders[0]}")
    return sys.stdout.isatty() and not hinders if FLAGS.stream is None else FLAGS.stream


def _in_order(found: Iterable[Any]) -> Iterator[Any]:
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
    """Prints several texts in their order, each as far as it is known.

    Args:
        tokens: how they are spelled.
        prompts: ids of the beginning of each.
        most: tokens that are added to each, unless one ends it before.
        out: where to; by default standard output.
    """

    def __init__(
        self,
        tokens: Tokens,
        prompts: Sequence[Sequence[int]],
        most: int,
        out: IO[str] | None = None,
    ) -> None:
        self._tokens, self._prompts, self._most = tokens, prompts, most
        self._out = sys.stdout if out is None else out
        self._found: list[list[int]] = [[] for _ in prompts]
        self._now, self._shown = 0, ""

    def take(self, number: int, token: int) -> None:
        """Takes the next token of a text.

        Args:
            number: of the text.
            token: its id.
        """
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
