"""Scores texts with a trained language model.

    pipemesh score --logdir=runs/tiny --file=texts.txt

Standard output has a line for each text: its log probability (natural logarithm), how many tokens
it has, their perplexity, and the text, with tabs between. The first token, which has no score, is
left out. The token that ends a text counts as one of its tokens, unless --noend_token is given. The
plan may be another than that of the training.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pipemesh.commands import process
from pipemesh.commands.flags import FLAGS, TEXTS, Flag, grouped
from pipemesh.commands.model_kind import Texts
from pipemesh.commands.texts import (
    TAKEN,
    json_number,
    line_of,
    model_of,
    parse_for_texts,
    read_texts,
)
from pipemesh.training.run import console

SCORE_FLAGS = grouped(
    TEXTS,
    Flag("prompt", help="The text to score."),
    Flag(
        "file",
        help="A file of texts to score, one a line, or FILE.jsonl with a string of JSON a line; "
        "blank lines are left out; - for standard input.",
    ),
    Flag(
        "end_token",
        bool,
        True,
        help="Count the token that ends a text; default: yes.",
    ),
    Flag(
        "format",
        default="text",
        choices=["text", "json"],
        help="Columns, or a line of JSON for each text, token by token.",
    ),
)


def main(argv: list[str]) -> int:
    """Scores as the flags say; returns the exit code.

    Raises:
        PipemeshError: the request cannot be satisfied.
    """
    process.import_quietly()
    taken = (*TAKEN, "num_microbatches", "schedule", "strict_devices")
    kind = parse_for_texts("score", argv, __doc__, SCORE_FLAGS, taken)
    texts = read_texts("scored")
    score(model_of(kind, "score", texts), texts)
    return 0


def score(model: Texts, texts: Sequence[str]) -> None:
    """Scores texts, and prints the scores in their order.

    Raises:
        PipemeshError: a text cannot be scored, or the checkpoint is another model's.
    """
    from pipemesh.decoding import Scorer
    from pipemesh.training.evaluation import Evaluation, restored

    subject, path, tokens, rows = model
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
