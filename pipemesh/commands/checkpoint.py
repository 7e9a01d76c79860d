"""Inspects, compares and converts checkpoints; imports and exports weights.

  pipemesh checkpoint inspect runs/lm
  pipemesh checkpoint inspect runs/lm/ckpt-300 --match='cell_001/.*/w_q' --verify
  pipemesh checkpoint diff runs/lm/ckpt-200 runs/lm/ckpt-300
  pipemesh checkpoint convert runs/lm/ckpt-300 exported/ckpt --dtype=bfloat16 --weights_only
  pipemesh checkpoint convert runs/lm/ckpt-300 theirs/train/ckpt-00000300 --stages=0,3,7
  pipemesh checkpoint convert theirs/train/ckpt-00000300 runs/lm/ckpt-300 --stages=none \\
      --like=runs/lm/ckpt-1
  pipemesh checkpoint import --from=gpt2/model.safetensors --logdir=runs/gpt2
  pipemesh checkpoint export runs/gpt2 tuned

A checkpoint is given by its path without any ending; a folder stands for its newest ckpt-<step>.
Those of lingvo and of TensorFlow's own Saver are read as well. `import` and `export` are for the
files of the package `transformers`: model.safetensors, config.json, and the tokenizer beside them.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from pipemesh.checkpoint.folder import hold_newest
from pipemesh.checkpoint.manifest import INDEX, SUFFIX, Manifest
from pipemesh.commands import process
from pipemesh.commands.flags import Command, Flag, FlagError, Flags, is_help, parse
from pipemesh.errors import CheckpointError
from pipemesh.example_models import example
from pipemesh.plan.plan import DTYPES
from pipemesh.text import columns, did_you_mean

_NO_STAGES, _STAGES_OF_LIKE = "none", "like"
# Notes by which programs resume, and the most values of a note that are listed.
_INTERNAL = ("best", "decoded_by", "evaluated_by", "judged", "skip")
_MOST_VALUES = 20
_PATH = Flag("path", argument="once", help="Path of a checkpoint, or its folder.")
_MATCH = Flag("match", value="PATTERN", help="Only tensors whose names match this expression.")
_DTYPE = Flag("dtype", choices=DTYPES, help="Type of the weights; default: float32.")


def _verb(name: str, about: str, *flags: Flag) -> Command:
    return Command(f"pipemesh checkpoint {name}", about, flags)


VERBS = {
    "inspect": _verb(
        "inspect",
        "Lists what a checkpoint has.",
        _PATH,
        Flag("verify", bool, False, help="Read all tensors, too."),
        _MATCH,
    ),
    "diff": _verb(
        "diff",
        "Lists the differences between two checkpoints; exits with 1 if there are any.",
        _PATH,
        Flag("other", argument="once", help="Path of another checkpoint."),
        _MATCH,
    ),
    "convert": _verb(
        "convert",
        "Writes a checkpoint anew.",
        _PATH,
        Flag("to", argument="once", help="Path of the checkpoint to write, without any ending."),
        Flag("dtype", choices=DTYPES, help="Type of all floating tensors."),
        Flag(
            "weights_only",
            bool,
            False,
            help="Leave out the optimizer's state and the position in the data.",
        ),
        Flag(
            "rename",
            repeated=True,
            value="PATTERN=NAME",
            help="A regular expression and its replacement; may be repeated.",
        ),
        Flag(
            "stages",
            value="BOUNDARIES",
            help="Names as in lingvo's own pipeline, with stages of these layers: 0,3,7 for one "
            "of the first three and one of the next four; like: with those of --like; none: "
            "without stages, as in this library.",
        ),
        Flag(
            "like",
            value="PATH",
            help="A checkpoint whose names and notes are taken over; missing numbers and positions "
            "in the data are copied from it.",
        ),
        _MATCH,
    ),
    "import": _verb(
        "import",
        "Begins a training with weights of the package `transformers`.",
        Flag(
            "from",
            required=True,
            value="PATH",
            help="model.safetensors, model.safetensors.index.json, or their folder.",
        ),
        Flag("config", value="PATH", help="config.json; default: the one beside the weights."),
        Flag("logdir", required=True, value="FOLDER", help="Folder of the training to begin."),
        Flag(
            "model",
            value="CLASS",
            help="package.module.Class to resume with, a subclass of the default; default: the "
            "class for config.json.",
        ),
        _DTYPE,
    ),
    "export": _verb(
        "export",
        "Writes imported weights in the format of `transformers` again.",
        _PATH,
        Flag("to", argument="once", help="Folder to write model.safetensors and config.json to."),
        _DTYPE,
        Flag(
            "merged",
            bool,
            False,
            help="Add adapters (LoRA) to their weights and write these; default: write the "
            "adapters alone, as the package `peft` does.",
        ),
    ),
}


def main(argv: list[str]) -> int:
    """Runs a verb; returns the exit code: 1 if `diff` finds differences."""
    verb = argv[1] if len(argv) > 1 else ""
    if verb not in VERBS:
        if is_help(argv):
            print(_help())
            return 0
        hint = f"{did_you_mean(verb, VERBS)}known are " if verb else ""
        raise FlagError(
            f"{repr(verb) + ' is no' if verb else 'give a'} verb of `pipemesh checkpoint`: {hint}"
            f"{', '.join(VERBS)}"
        )
    flags = parse(argv[1:], VERBS[verb])
    # Files are read and written: no device is needed, and none announces itself.
    process.import_quietly()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    # First: it says what is missing.
    importlib.import_module("pipemesh.needs_tensorflow")
    if verb in ("import", "export"):
        return _transfer(verb, flags)
    wanted = _matcher(flags.match)
    path = _checkpoint(flags.path)
    other = _checkpoint(flags.other) if verb == "diff" else ""
    # It loads TensorFlow, which takes seconds.
    from pipemesh.checkpoint import conversion

    if verb == "diff":
        lines, differ = conversion.diff(path, other, wanted)
        print("\n".join(lines))
        return int(differ)
    if verb == "convert":
        return _convert(path, wanted, flags)
    for line in _about(path):
        print(line)
    print("\n".join(conversion.listing(path, wanted)))
    if flags.verify:
        print(conversion.verify(path))
    return 0


def _help() -> str:
    """Returns the help of all verbs."""
    lines = columns([[f"  {name}", verb.about or ""] for name, verb in VERBS.items()], left=(0, 1))
    verbs = "\n".join(["verbs:", *lines])
    more = f"{verbs}\n\n`pipemesh checkpoint VERB --help` describes a verb."
    return Command("pipemesh checkpoint VERB ...", __doc__, (), more).help()


def _convert(path: str, wanted: Callable[[str], bool], flags: Flags) -> int:
    """Writes a checkpoint anew, under other names or types; returns the exit code."""
    from pipemesh.checkpoint import conversion

    rules = [_rule(text) for text in flags.rename]
    if os.path.exists(flags.to + INDEX):
        raise CheckpointError(f"{flags.to} exists; give another path, or remove it")
    like = flags.like and _checkpoint(flags.like)
    # lingvo reads no position in the data.
    positions = not flags.weights_only and flags.stages in (None, _NO_STAGES)
    names = conversion.names_of(path, wanted, state=not flags.weights_only, places=positions)
    new_names = {name: _renamed(name, rules) for name in names}
    if flags.stages is not None:
        from pipemesh.layers.lingvo_gpipe import with_stages, without_stages

        stages, called = _stages(flags.stages, like), new_names.values()
        in_stages = with_stages(called, stages) if stages else without_stages(called)
        new_names = {name: in_stages[new] for name, new in new_names.items()}
    print(conversion.convert(path, flags.to, new_names, flags.dtype, like))
    return 0


def _transfer(verb: str, flags: Flags) -> int:
    """Imports or exports weights of the package `transformers`; returns the exit code."""
    process.look_here()
    module: Any = importlib.import_module(example("pretrained.transfer"))
    dtype = flags.dtype or "float32"
    if verb == "import":
        source = flags.value("from")
        lines = module.import_weights(source, flags.logdir, flags.config, flags.model, dtype)
    else:
        lines = module.export_weights(_checkpoint(flags.path), flags.to, dtype, flags.merged)
    print("\n".join(lines))
    return 0


def _renamed(name: str, rules: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, new in rules:
        name = pattern.sub(new, name)
    return name


def _stages(text: str, like: str | None) -> Sequence[int]:
    """Returns boundaries of stages; () for names without stages."""
    if text == _NO_STAGES:
        return ()
    if text == _STAGES_OF_LIKE:
        if not like:
            raise CheckpointError("--stages=like needs --like, a checkpoint that lingvo wrote")
        from pipemesh.checkpoint.conversion import names_of
        from pipemesh.layers.lingvo_gpipe import boundaries_in

        return boundaries_in(names_of(like))
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise CheckpointError(
            f"--stages={text!r} is neither {_NO_STAGES!r} nor {_STAGES_OF_LIKE!r} nor boundaries "
            "such as 0,3,7"
        ) from None


def _checkpoint(path: str) -> str:
    """Returns the path of a checkpoint, given its folder or one of its files."""
    if os.path.isdir(path):
        newest = hold_newest(path)
        if newest is None:
            raise CheckpointError(f"{path!r} has no checkpoint (ckpt-<step>.index)")
        return newest
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
    """Returns the lines of the manifest, if there is one."""
    if not os.path.exists(path + SUFFIX):
        return [f"{path}: no manifest, so it is another program's"]
    manifest = Manifest.read(path)
    manifest.check(path)
    lines = [f"{path}: step {manifest.step}"]
    if manifest.score is not None:
        lines.append(f"score: {manifest.score:g}")
    shown = {key: value for key, value in manifest.note.items() if key not in _INTERNAL}
    return [*lines, *(f"{key}: {_row(key, value, path)}" for key, value in shown.items())]


def _row(key: str, value: Any, path: str) -> str:
    """Returns a value of a note in a few words; the manifest has all of it as JSON."""
    if not isinstance(value, dict):
        return _short(value)
    values = cast("dict[str, Any]", value)
    if len(values) > _MOST_VALUES:
        return f"{len(values)} values, in {path}{SUFFIX}"
    if key == "flags":
        return " ".join(f"--{name}={_short(item)}" for name, item in values.items())
    if key == "plan":
        # As elsewhere, without the values that a plan has by default.
        return " ".join(f"{n}={item}" for n, item in values.items() if item not in ("", "false"))
    return ", ".join(f"{name} {_short(item)}" for name, item in values.items())


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
