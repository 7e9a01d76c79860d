"""Continues texts with the language model.

    python -m models.one_billion_word.decode --logdir=runs/OneBillionWordTiny \\
        --prompt="The module" --max_tokens=24

Standard output has the texts and nothing else. Neither plan nor text need be those of the training.
"""

from __future__ import annotations

import dataclasses

from pipemesh.training.command import program


def main(argv: list[str]) -> int:
    """Decodes as the flags say; returns the exit code."""
    from models.one_billion_word import about, command_line
    from models.one_billion_word.train import Text, make_subject
    from models.one_billion_word.vocabulary import Vocabulary
    from pipemesh.checkpoint import Manifest
    from pipemesh.training.command import decode
    from pipemesh.training.command.evaluate import check_flags, checkpoint_of, define_checkpoint

    define_checkpoint()
    decode.define()
    command_line.parse(argv, __doc__)
    check_flags()
    flags = command_line.FLAGS
    texts = decode.prompts()
    given = [name for name in decode.OF_TRAINING if flags[name].present]
    if given:
        raise decode.FlagError(f"--{given[0]} is for training; leave it out")
    # Other stages than those of the training are cut elsewhere.
    command_line.take_up(flags.checkpoint, (*decode.OF_TRAINING, "boundaries"))
    request = command_line.request()
    path = checkpoint_of(request.logdir)
    there = about.About.from_note(Manifest.read(path).note)
    there.check_model(request.model, request.settings, request.logdir)
    words = Vocabulary(there.vocabulary)
    # What is chosen is how a batch is cut, and there is none.
    settings = request.settings
    settings.CHOSEN, settings.PLAN = (), dataclasses.replace(settings.PLAN, num_microbatches=1)
    subject, _ = make_subject(request, Text(None, there.data, words, path, there))

    def encode(text: str) -> list[int]:
        return [words.bos_id, *words.encode(text)]

    tokens = decode.Tokens(
        encode,
        lambda ids: words.decode([each for each in ids if each != words.bos_id]),
        frozenset([words.eos_id]),
        settings.SEQUENCE_LENGTH,
        words.size,
    )
    decode.decode(subject, path, tokens, texts)
    return 0


if __name__ == "__main__":
    program.run(main)
