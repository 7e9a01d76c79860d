"""Translates held-out sentences with a checkpoint, and prints BLEU.

    python -m models.translation.evaluate --logdir=runs/TranslationTiny --beams=4

BLEU is that of sacrebleu, with its signature; beside it stands the BLEU of copying the source. The
loss is printed by `pipemesh evaluate`.
"""

from __future__ import annotations

import os
from typing import Any

from pipemesh.checkpoint import Manifest
from pipemesh.commands import from_python, model_kind, process
from pipemesh.commands.flags import FILES, FLAGS, Command, Flag, grouped, parse
from pipemesh.commands.model_kind import CHECKPOINT_FLAG
from pipemesh.errors import DataError, needed
from pipemesh.text import count_text

_SHOWN = 5
_FLAGS = grouped(
    FILES,
    Flag("logdir", help="Log directory of the training; --checkpoint may stand in its place."),
    CHECKPOINT_FLAG,
    Flag(
        "pairs", int, 500, least=1, help="Maximum number of pairs, spread over the held-out data."
    ),
    Flag(
        "max_tokens",
        int,
        least=1,
        help="Maximum number of tokens of a translation; default: the model's.",
    ),
    Flag("beams", int, least=1, help="Beam width; default: greedy."),
    Flag("mesh_shape", help="Mesh to decode with; default: that of the training."),
    Flag("layout", help="Layout rules to decode with."),
    Flag("plain", bool, help="Decode without a pipeline."),
)
_OF_DECODING = ("max_tokens", "beams", "mesh_shape", "layout", "plain")


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    process.import_quietly()
    parse(argv, Command(argv[0], __doc__, _FLAGS))
    path = model_kind.checkpoint_of(FLAGS.logdir or "")
    given = {name: FLAGS.value(name) for name in _OF_DECODING}
    report(path, FLAGS.pairs, **given)
    return 0


def report(path: str, most: int, **flags: Any) -> None:
    """Translates held-out sentences with a checkpoint, and prints BLEU and some translations.

    Args:
        path: the checkpoint.
        most: maximum number of sentences.
        **flags: flags of `pipemesh decode`.

    Raises:
        DataError: there are no held-out pairs that the model can read.
        MissingPackageError: sacrebleu is not installed.
    """
    bleu, config = load_bleu(), _config_of(path)
    pairs, left_out = heldout_pairs(config)
    if flags.get("max_tokens") is None:
        # One position is for the token that begins the target.
        flags["max_tokens"] = config.SEQUENCE_LENGTH - 1
    # Spread evenly.
    number = min(most, len(pairs))
    pairs = [pairs[i * len(pairs) // number] for i in range(number)]
    sources, targets = zip(*pairs, strict=True)
    found = from_python.decode(sources, checkpoint=path, **flags)
    texts = [each.text for each in found]
    score, copied = (bleu.corpus_score(each, [targets]) for each in (texts, list(sources)))
    how = f"{flags['beams']} beams" if flags.get("beams") else "greedy"
    told = f"; longer than the model reads and left out: {left_out}" if left_out else ""
    print(f"held-out translations of {path}: {count_text(number, 'pair')}, {how}{told}")
    for source, text, target in list(zip(sources, texts, targets, strict=True))[
        :: max(1, number // _SHOWN)
    ][:_SHOWN]:
        print(f"  {source}\n    -> {text}\n    wanted: {target}")
    print(f"BLEU {score.score:.1f}, copying the source {copied.score:.1f}; {bleu.get_signature()}")


def _config_of(path: str) -> Any:
    """Returns the configuration of a checkpoint, with the flags of its run."""
    from pipemesh.training import find_model

    note, folder = Manifest.read(path).note, os.path.dirname(path) or "."
    config = find_model(note["model"])()
    for name, value in {**note["flags"], "logdir": folder}.items():
        if name in model_kind.ATTRIBUTES | {"logdir"}:
            setattr(config, name.upper(), value)
    return config


def heldout_pairs(config: Any) -> tuple[list[tuple[str, str]], int]:
    """Returns the held-out pairs of a configuration, and how many are too long for it."""
    from pipemesh.data import parse_sources
    from pipemesh.data.sources import rows_of

    from . import spelling
    from .params import heldout_of

    sources = heldout_of(config)
    if sources is None:
        raise DataError("there is no held-out data; train with --heldout_data")
    listed = sources if isinstance(sources, str) else sources()
    words = spelling.read(config.LOGDIR, config.VOCAB_SIZE)
    rows = [row for source in parse_sources(listed) for _, row in rows_of(source)]
    pairs = [(row["prompt"], row["completion"]) for row in rows]
    fitting = [
        pair
        for pair in pairs
        # With the token that ends it.
        if len(words.spans(pair[0], False)[0]) < config.SEQUENCE_LENGTH
    ]
    if not fitting:
        raise DataError(f"{listed!r} has no pair whose source the model can read")
    return fitting, len(pairs) - len(fitting)


def load_bleu() -> Any:
    """Returns the metric; raises MissingPackageError if sacrebleu is not installed."""
    return needed("sacrebleu", "BLEU", "examples").BLEU()


if __name__ == "__main__":
    process.run(main)
