"""The texts that a command line gives, and the flags that their programs take."""

from __future__ import annotations

import json
import sys

from absl import flags

from pipemesh.training.command import host_flags
from pipemesh.training.command.flags import FlagError

FLAGS = flags.FLAGS

# Flags of checkpoints and of the plan that decoding takes; those of training are refused.
TAKEN = (
    *("logdir", "checkpoint", "model", "config", "ids"),
    *("mesh_shape", "layout", "allow_idle", "boundaries", "lowering", "plain"),
    *("compute_dtype", "device_type"),
    *(name for name in host_flags.NAMES if name != "elastic"),
)
# A file with this ending has a string of JSON a line, which is the text exactly.
_EXACT = ".jsonl"


def read(what: str) -> list[str]:
    """Returns the texts of `--prompt` or `--file`.

    Args:
        what: is to be done with them, for errors.

    Raises:
        FlagError: there is none, or both flags are given.
    """
    if (FLAGS.prompt is None) == (FLAGS.file is None):
        raise FlagError(f"what is to be {what}? give either --prompt or --file")
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
