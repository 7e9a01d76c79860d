"""Scores texts with a trained language model.

    pipemesh score --logdir=runs/OneBillionWordTiny --file=texts.txt

Standard output has a line for each text: its log probability (natural logarithm), how many tokens
it has, their perplexity, and the text, with tabs between. The first token is given and not scored.
The token that ends a text counts as one of its tokens, unless --noend_token is given. The plan may
be another than that of the training.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from absl import flags

from pipemesh.training.command import given_texts, quiet
from pipemesh.training.command.decode import Tokens, helped, json_number, line_of, program_of
from pipemesh.training.command.flags import TEXTS, group
from pipemesh.training.run import console

FLAGS = flags.FLAGS

# What it takes besides its own flags.
TAKEN = (*given_texts.TAKEN, "num_microbatches", "schedule", "strict_devices")

# Flags that are defined here belong to the program that asks for them.
flags.disclaim_key_flags()


def main(argv: list[str]) -> int:
    """Scores as the flags say.

    Args:
        argv: the program and its arguments.

    Returns:
        The exit code.

    Raises:
        PipemeshError: what is asked for cannot be had.
    """
    quiet.install()
    if helped(argv, __doc__, define, TAKEN):
        return 0
    return program_of(argv).score(argv)


@group(TEXTS)
def define() -> None:
    """Defines the flags of scoring."""
    flags.DEFINE_string("prompt", None, "The text to score.")
    flags.DEFINE_string(
        "file",
        None,
        "A file of texts to score, one a line, or FILE.jsonl with a string of JSON a line; blank "
        "lines are left out; - for the input.",
    )
    flags.DEFINE_bool(
        "end_token",
        True,
        "Count the token that ends a text, which a text has once at most.",
    )
    flags.DEFINE_enum(
        "format",
        "text",
        ["text", "json"],
        "Columns, or a line of JSON for each, token by token.",
    )


def score(subject: Any, path: str, tokens: Tokens, rows: int, texts: Sequence[str]) -> None:
    """Scores texts, and prints what was found in their order.

    Args:
        subject: the model.
        path: of the checkpoint.
        tokens: how it spells text.
        rows: of a batch.
        texts: to be scored.

    Raises:
        PipemeshError: a text cannot be scored, or the checkpoint is another model's.
    """
    from pipemesh.decoding import Scorer
    from pipemesh.training.evaluation import Evaluation, restored

    console.output_matters()
    ids = [ended(tokens.encode(text), tokens.stop) for text in texts]
    with console.waiting("making the model"):
        trained = restored(subject, path)
    compute = Evaluation(subject, trained, lambda _, per_example: per_example.xent).outcome
    scorer = Scorer(compute, rows=rows, length=tokens.length, vocab_size=tokens.vocab_size)
    for number, text in enumerate(ids, 1):
        # Before the first of them.
        scorer.check(text, number)
    for found, text in zip(scorer.score(ids), texts, strict=True):
        print(_told(found, text), flush=True)


def ended(ids: Sequence[int], stop: Collection[int]) -> list[int]:
    """Returns a text with one token that ends it, or with none.

    Args:
        ids: of the text; some tokenizers end it themselves.
        stop: tokens that end a text.
    """
    has_end = bool(ids) and ids[-1] in stop
    if not FLAGS.end_token:
        return list(ids[:-1] if has_end else ids)
    return [*ids, *([] if has_end else sorted(stop)[:1])]


def _told(found: Any, text: str) -> str:
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
