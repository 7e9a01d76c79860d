"""Texts, their flags and the model of a checkpoint, for `decode`, `score` and `export`."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pipemesh.commands import host_flags
from pipemesh.commands.flags import FLAGS, Command, Flag, FlagError, is_help, parse
from pipemesh.commands.model_kind import (
    CHECKPOINT_FLAG,
    REGISTERED,
    ModelKind,
    Texts,
    check_flags,
    kind_called,
    named,
    note_of,
)
from pipemesh.commands.training_flags import take_up
from pipemesh.errors import CheckpointError
from pipemesh.training.run import console

# Flags of a training that decoding has, too; those of training alone are refused.
TAKEN = (
    *("logdir", "model", "config"),
    *("mesh_shape", "layout", "allow_idle", "boundaries", "lowering", "plain"),
    *("compute_dtype", "device_type"),
    *(name for name in host_flags.NAMES if name != "elastic"),
)
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
    """Parses the command line of `decode`, `score` or `export`, with flags of the model's kind.

    Args:
        command: its name.
        argv: the program and its arguments.
        about: begins `--help`.
        flags: of the command itself.
        taken: flags of a training that it has besides.
        why: reasons why others are refused, by name.

    Returns:
        The kind of the model of the checkpoint that the command line names.

    Raises:
        CheckpointError: there is no checkpoint, or its model knows no texts.
        FlagError: a flag is wrong.
    """
    if is_help(argv) and not note_of(argv):
        # No checkpoint says which kind it is.
        kind: ModelKind = REGISTERED
    else:
        kind = _kind_of(argv)
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
    """Returns the model of a command on texts; flags but `leave` are taken from its checkpoint.

    Raises:
        PipemeshError: the request cannot be satisfied.
    """
    take_up(kind.logdir(), FLAGS.checkpoint, leave, tells=False)
    return kind.texts(command, texts)


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
    """Returns the texts of `--prompt` or `--file`, which are to be `continued` or `scored`.

    Raises:
        FlagError: there is none, or both flags are given.
    """
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
