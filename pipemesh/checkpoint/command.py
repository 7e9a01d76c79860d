"""Looks into checkpoints, compares them, writes them anew, takes in and hands out weights.

  pipemesh checkpoint inspect runs/lm
  pipemesh checkpoint inspect runs/lm/ckpt-300 --match 'cell_001/.*/w_q' --verify
  pipemesh checkpoint diff runs/lm/ckpt-200 runs/lm/ckpt-300
  pipemesh checkpoint convert runs/lm/ckpt-300 exported/ckpt --dtype bfloat16 --weights-only
  pipemesh checkpoint convert runs/lm/ckpt-300 theirs/train/ckpt-00000300 --stages 0,3,7
  pipemesh checkpoint convert theirs/train/ckpt-00000300 runs/lm/ckpt-300 --stages none \\
      --like runs/lm/ckpt-1
  pipemesh checkpoint import --from gpt2/model.safetensors --logdir runs/gpt2
  pipemesh checkpoint export runs/gpt2 tuned

A checkpoint is given by its path without any ending; a folder stands for its newest one. Those of
lingvo and of TensorFlow's own Saver are read as well. `import` and `export` are for the files of
the package `transformers`: model.safetensors, config.json, and the tokenizer beside them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from pipemesh.checkpoint.lock import hold_newest
from pipemesh.checkpoint.manifest import INDEX, SUFFIX, Manifest
from pipemesh.errors import CheckpointError

DTYPES = ("float32", "bfloat16", "float16")
_NO_STAGES, _STAGES_OF_LIKE = "none", "like"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `pipemesh checkpoint`.

    Args:
        parser: the parser of this subcommand.
    """
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)
    inspect = verbs.add_parser("inspect", help="what it has", allow_abbrev=False)
    inspect.add_argument("path")
    inspect.add_argument("--verify", action="store_true", help="read all tensors, too")
    diff = verbs.add_parser(
        "diff", help="what two have otherwise; exits with 1 if they do", allow_abbrev=False
    )
    diff.add_argument("path")
    diff.add_argument("other")
    convert = verbs.add_parser("convert", help="write it anew", allow_abbrev=False)
    convert.add_argument("path")
    convert.add_argument("to", help="path of the checkpoint to write, without any ending")
    convert.add_argument("--dtype", choices=DTYPES, help="of all floating tensors")
    convert.add_argument(
        "--weights-only",
        action="store_true",
        help="neither the optimizer's state nor places in data",
    )
    convert.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="PATTERN=NAME",
        help="a regular expression, and what stands in its place; again for more",
    )
    convert.add_argument(
        "--stages",
        metavar="BOUNDARIES",
        help="names as lingvo's own pipeline has them, with stages of these layers: 0,3,7 for one "
        "of the first three and one of the next four; like: with those of --like; none: without "
        "stages, as in this library",
    )
    convert.add_argument(
        "--like",
        metavar="PATH",
        help="a checkpoint that it is to be like, in names and what is noted; numbers and places "
        "in data that are missing are taken from there",
    )
    _add_weights_of_others(verbs)
    for verb in (inspect, diff, convert):
        verb.add_argument(
            "--match",
            metavar="PATTERN",
            help="tensors alone in whose names this expression is found",
        )


def _add_weights_of_others(verbs: Any) -> None:
    enter = verbs.add_parser(
        "import", help="begin a training with weights of others", allow_abbrev=False
    )
    enter.add_argument(
        "--from",
        dest="source",
        metavar="PATH",
        required=True,
        help="model.safetensors, model.safetensors.index.json, or their folder",
    )
    enter.add_argument(
        "--config", metavar="PATH", help="config.json; by default the one beside the weights"
    )
    enter.add_argument("--logdir", required=True, help="folder of the training to begin")
    enter.add_argument(
        "--model",
        metavar="CLASS",
        help="package.module.Class that goes on with them, derived from the one that is taken "
        "otherwise, by the config.json",
    )
    leave = verbs.add_parser(
        "export", help="write weights that were imported as they came", allow_abbrev=False
    )
    leave.add_argument("path")
    leave.add_argument("to", help="folder to write model.safetensors and config.json to")
    for verb in (enter, leave):
        verb.add_argument("--dtype", choices=DTYPES, help="of the weights; default: float32")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb that was asked for.

    Args:
        arguments: parsed ones.

    Returns:
        0; of `diff` 1 if the checkpoints differ.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or cannot be written so.
    """
    # Files are read and written: no device is asked for, and none announces itself.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    # First: it says what is missing.
    importlib.import_module("pipemesh.needs_tensorflow")
    if arguments.verb == "import":
        return int(arguments.weights_of_others(arguments))
    if arguments.verb == "export":
        arguments.path = _found(arguments.path)
        return int(arguments.weights_of_others(arguments))
    from pipemesh.checkpoint import conversion, tensors

    wanted = _matcher(arguments.match)
    path = _found(arguments.path)
    if arguments.verb == "diff":
        lines, differ = tensors.diff(path, _found(arguments.other), wanted)
        print("\n".join(lines))
        return int(differ)
    if arguments.verb == "inspect":
        for line in _about(path):
            print(line)
        print("\n".join(tensors.listing(path, wanted)))
        if arguments.verify:
            print(tensors.verify(path))
        return 0
    rules = [_rule(text) for text in arguments.rename]
    if os.path.exists(arguments.to + INDEX):
        raise CheckpointError(f"{arguments.to} exists; give another path, or remove it")

    like = arguments.like and _found(arguments.like)
    kept = not arguments.weights_only
    # Places in data are nothing that lingvo reads.
    places = kept and arguments.stages in (None, _NO_STAGES)
    names = tensors.names_of(path, wanted, state=kept, places=places)
    called = {name: _renamed(name, rules) for name in names}
    if arguments.stages is not None:
        stages = _stages(arguments.stages, like)
        there = tensors.names_of(like) if like else []
        in_stages = arguments.lingvo_names(called.values(), stages, there)
        called = {name: in_stages[new] for name, new in called.items()}
    print(conversion.convert(path, arguments.to, called, arguments.dtype, like))
    return 0


def _renamed(name: str, rules: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, new in rules:
        name = pattern.sub(new, name)
    return name


def _stages(text: str, like: str | None) -> tuple[int, ...] | None:
    """Boundaries of stages; () for names without stages, None for those of another checkpoint."""
    if text == _NO_STAGES:
        return ()
    if text == _STAGES_OF_LIKE:
        if not like:
            raise CheckpointError("--stages=like wants --like, a checkpoint that lingvo wrote")
        return None
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise CheckpointError(
            f"--stages={text!r} is neither {_NO_STAGES!r} nor {_STAGES_OF_LIKE!r} nor boundaries "
            "such as 0,3,7"
        ) from None


def _found(path: str) -> str:
    """Path of a checkpoint, for that of a folder or of one of its files."""
    if os.path.isdir(path):
        found = hold_newest(path)
        if found is None:
            raise CheckpointError(f"{path!r} has no checkpoint (ckpt-<step>.index)")
        return found
    for ending in (INDEX, SUFFIX):
        path = path.removesuffix(ending)
    path = re.sub(r"\.data-\d{5}-of-\d{5}$", "", path)
    if not os.path.exists(path + INDEX):
        raise CheckpointError(
            f"{path!r} is no checkpoint: there is no {path}{INDEX}; give its path without any "
            "ending, or its folder"
        )
    return path


def _about(path: str) -> list[str]:
    """What the manifest says, if there is one."""
    if not os.path.exists(path + SUFFIX):
        return [f"{path}: no manifest, so it is another program's"]
    manifest = Manifest.read(path)
    manifest.check(path)
    lines = [f"{path}: step {manifest.step}"]
    if manifest.score is not None:
        lines.append(f"score: {manifest.score:g}")
    for key, value in manifest.note.items():
        lines += _told(key, value)
    return lines


def _told(key: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        inside = ", ".join(f"{name} {_short(each)}" for name, each in value.items())
        return [f"{key}: {inside}"]
    return [f"{key}: {_short(value)}"]


def _short(value: Any) -> str:
    text = "none" if value in ("", None) else str(value)
    return text if len(text) <= 60 else f"({len(text):,} characters)"


def _matcher(pattern: str | None) -> Callable[[str], bool]:
    if pattern is None:
        return lambda _: True
    compiled = _compiled("match", pattern)
    return lambda name: compiled.search(name) is not None


def _rule(text: str) -> tuple[re.Pattern[str], str]:
    pattern, equals, new = text.rpartition("=")
    if not equals:
        raise CheckpointError(f"--rename={text!r} has no '='; write PATTERN=NAME")
    return _compiled("rename", pattern), new


def _compiled(flag: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"--{flag}={pattern!r} is no regular expression ({error})") from error
