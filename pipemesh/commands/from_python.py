"""Continues and scores texts from Python, each call in a process of its own.

So the caller needs no TensorFlow, and TensorFlow with other devices in the caller is left alone.
Give many texts in one call, or use `pipemesh.decoding`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from pipemesh.errors import DecodingError

# The exit code of what users can mend.
_REFUSED = 2


@dataclasses.dataclass(frozen=True)
class DecodedText:
    """A prompt and what follows it.

    Attributes:
        prompt: the given text.
        text: it and its continuation.
        tokens: ids of the continuation, the one that ended it among them.
        log_probs: of each of them under the model, natural logarithms.
        stopped: whether a token ended it; otherwise it has the maximum number of tokens.
        others: further results of a search, best first: texts and their log probabilities.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    stopped: bool
    others: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class TextScore:
    """The score of a text under a model.

    Attributes:
        text: the given text.
        log_prob: of the whole text, a natural logarithm.
        perplexity: of a token; infinite if a token is impossible.
        tokens: ids, the one that ends the text among them unless `end_token=False` is given.
        log_probs: of each of them.
    """

    text: str
    log_prob: float
    perplexity: float
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]


def decode(
    prompts: Iterable[str],
    *,
    logdir: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    **flags: Any,
) -> list[DecodedText]:
    """Continues texts with what was trained; `pipemesh decode` for programs.

    Args:
        prompts: texts of one line each.
        logdir: folder of a training, whose newest checkpoint is taken.
        checkpoint: path of one, in place of the folder.
        **flags: flags of `pipemesh decode`, such as `max_tokens=24`, `mesh_shape="layers:2"`,
            `temperature=0.8`, `beams=4` or `plain=True`.

    Returns:
        Each prompt and what follows it, in their order.

    Raises:
        DecodingError: the request cannot be satisfied; has the error of the command.
        RuntimeError: the command failed otherwise; has its whole standard error.

    Example:
        >>> pipemesh.decode(["The module"], logdir="runs/tiny")  # doctest: +SKIP
        [DecodedText(prompt='The module', text='The module is ...', ...)]
        >>> decode([])
        []
    """
    return [
        DecodedText(
            found["prompt"],
            found["text"],
            tuple(found["tokens"]),
            tuple(map(_log_prob, found["log_probs"])),
            found["stopped"],
            tuple((each["text"], _log_prob(each["log_prob"])) for each in found.get("others", ())),
        )
        for found in _lines("decode", prompts, logdir=logdir, checkpoint=checkpoint, **flags)
    ]


def score(
    texts: Iterable[str],
    *,
    logdir: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    **flags: Any,
) -> list[TextScore]:
    """Scores texts with what was trained; `pipemesh score` for programs.

    Arguments and errors are those of `decode`, but for flags of `pipemesh score`, such as
    `plain=True` or `end_token=False`. Returns the score of each text, in their order.

    Example:
        >>> score([])
        []
    """
    return [
        TextScore(
            found["text"],
            _log_prob(found["log_prob"]),
            float("inf") if found["perplexity"] is None else found["perplexity"],
            tuple(found["tokens"]),
            tuple(map(_log_prob, found["log_probs"])),
        )
        for found in _lines("score", texts, logdir=logdir, checkpoint=checkpoint, **flags)
    ]


def _lines(command: str, texts: Iterable[str], **flags: Any) -> Sequence[dict[str, Any]]:
    """Runs a command on texts, and returns its lines of JSON."""
    if isinstance(texts, str):
        raise DecodingError(f"{texts!r} is one text; give a list of them")
    lines: list[Any] = list(texts)
    if not lines:
        return []
    for number, line in enumerate(lines, 1):
        if not isinstance(line, str) or "\n" in line or not line.strip():
            raise DecodingError(f"text {number} is {line!r}; give texts of one line each")
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise DecodingError(f"text {number} is {line!r}, which is not UTF-8") from error
    for name in ("prompt", "file", "format", "stream", "help", "helpfull", "helpshort"):
        if name in flags:
            raise DecodingError(f"{name} is for the command alone; leave it out")
    words = [_flag(name, value) for name, value in flags.items() if value is not None]
    # What can be imported here can be imported there.
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory() as folder:
        # As JSON, which keeps every character of a text.
        file = pathlib.Path(folder, "texts.jsonl")
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="ascii")
        words = [command, f"--file={file}", "--format=json", *words]
        done = subprocess.run(
            [sys.executable, "-m", "pipemesh", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, **paths, "PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"},
            check=False,
        )
    told = done.stderr.decode(errors="replace").strip()
    if done.returncode == _REFUSED and told:
        raise DecodingError(told.splitlines()[-1].removeprefix("error: "))
    # Not by what else may end a line, which JSON leaves as it is.
    found = [json.loads(line) for line in done.stdout.decode().split("\n") if line]
    if done.returncode or len(found) != len(lines):
        raise RuntimeError(
            f"pipemesh {command} ended with exit code {done.returncode} after {len(found)} of "
            f"{len(lines)} texts:\n{told}"
        )
    return found


def _log_prob(value: float | None) -> float:
    """Returns minus infinity for null: JSON knows no infinity."""
    return float("-inf") if value is None else value


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    return f"--{name}={value}"
