"""Weights of a model of `transformers` as a checkpoint here, and a checkpoint as such weights."""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pipemesh.checkpoint import Folder, Manifest, newest
from pipemesh.checkpoint.files import write_whole
from pipemesh.checkpoint.folder import list_for_tensorflow, path_of
from pipemesh.errors import CheckpointError, SaveError

from . import config as configs
from . import names, safetensors_file, tokenizer
from .config import Config, WeightsError
from .names import Weight
from .safetensors_file import DTYPES, TensorFiles

# What may lie beside weights, and goes with them.
_BESIDE = (
    tokenizer.JSON,
    tokenizer.SENTENCEPIECE,
    tokenizer.OPTIONS,
    tokenizer.ADDED,
    tokenizer.SPECIAL,
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    configs.GENERATION,
)
# What a file calls the dtype of its weights.
_DTYPE_KEYS = ("dtype", "torch_dtype")
_OF_DTYPE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def import_weights(
    source: str,
    logdir: str,
    config_path: str | None = None,
    model: str | None = None,
    dtype: str = "float32",
) -> list[str]:
    """Begins a training with weights of others: its first checkpoint has them.

    Args:
        source: path of a file of safetensors, of an index, or of a folder with one of them.
        logdir: folder of the training; it is made if need be.
        config_path: of the `config.json`; by default the one beside the weights.
        model: `package.module.Class` that goes on, of those in `params` or derived from them; by
            default the one that the `config.json` asks for.
        dtype: of the weights in the checkpoint; a training casts them to its own.

    Returns:
        Lines that say what was done.

    Raises:
        WeightsError: the weights, or what lies beside them, cannot be had as they are.
        CheckpointError: the folder has checkpoints, or is in use.
        SaveError: something cannot be written.
    """
    source = safetensors_file.find(source)
    beside = os.path.dirname(source)
    config_path = config_path or os.path.join(beside, configs.FILE)
    config = configs.read(config_path)
    _, notes = configs.ends_of(beside, config)
    weights = names.weights_of(config)
    with TensorFiles(source) as files:
        weights = _as_in(files, weights, config)
        found = tokenizer.load(beside, config)
        note = _note_of(logdir, config, model)
        with _cleared(logdir), Folder(logdir), contextlib.ExitStack() as undo:
            if there := newest(logdir):
                raise CheckpointError(
                    f"{logdir!r} has a checkpoint, {there}; give another --logdir"
                )
            paths = {name: os.path.join(beside, name) for name in _BESIDE}
            for name, path in {configs.FILE: config_path, **paths}.items():
                to = os.path.join(logdir, name)
                _check_leftover(path, to)
                if os.path.exists(path) and not os.path.exists(to):
                    undo.callback(_remove, to)
                    _copy(path, to)
            path = path_of(logdir, 0)
            _write(path, files, weights, note, dtype)
            undo.pop_all()
    numbers = sum(int(np.prod(weight.shape)) for weight in weights)
    told = f"{path}: {len(weights)} weights of {source} ({config.model_type}), {numbers:,} numbers"
    spelled = (
        f"tokenizer: {found.path}"
        if found
        else (
            f"no tokenizer: beside the weights is neither {tokenizer.JSON} nor "
            f"{tokenizer.SENTENCEPIECE}, so `pipemesh decode` takes --ids alone; if there are "
            f"other files of one, {tokenizer.SAVE}"
        )
    )
    return [told, spelled, *(found.notes if found else ()), *config.notes, *notes]


def export_weights(path: str, to: str, dtype: str = "float32") -> list[str]:
    """Writes the weights of a checkpoint as files that the package `transformers` reads.

    Args:
        path: of the checkpoint, of a training that was begun by `import_weights`.
        to: the folder to write to; it is made if need be, and has no weights yet.
        dtype: that they are to have.

    Returns:
        Lines that say what was done.

    Raises:
        CheckpointError: the checkpoint is of another model.
        SaveError: something cannot be written.
    """
    from pipemesh.checkpoint.reader import contents
    from pipemesh.checkpoint.tensors import read_one

    folder = os.path.dirname(path) or "."
    config_path = os.path.join(folder, configs.FILE)
    if not os.path.exists(config_path):
        raise CheckpointError(
            f"{path} is of no model that can be exported: there is no {config_path}, which "
            "`pipemesh checkpoint import` puts there"
        )
    Manifest.read(path).check(path)
    config = configs.read(config_path)
    weights = names.weights_of(config)
    shapes, dtypes = contents(path)
    for weight in weights:
        if tuple(shapes.get(weight.name, ())) != weight.shape:
            has = f"has it as {shapes[weight.name]}" if weight.name in shapes else "has none"
            raise CheckpointError(
                f"{path} is of another model than {config_path}, which says that {weight.name!r} "
                f"has shape {list(weight.shape)}: it {has}"
            )
    for name in (safetensors_file.ONE, safetensors_file.INDEX, configs.FILE, *_BESIDE):
        if os.path.lexists(os.path.join(to, name)):
            raise SaveError(f"{os.path.join(to, name)} exists; give another folder")
    wanted = DTYPES[_OF_DTYPE[dtype]]

    def joined(parts: Sequence[Weight]) -> np.ndarray:
        found = [
            weight.to_theirs(read_one(path, weight.name, dtypes[weight.name]).numpy())
            for weight in parts
        ]
        whole = np.concatenate(found, -1) if len(found) > 1 else found[0]
        return _cast(whole, wanted, parts[0].theirs)

    def tensors() -> Iterator[tuple[str, int, Callable[[], np.ndarray]]]:
        for theirs, parts in names.by_theirs(weights):
            size = int(np.prod(parts[0].there)) * wanted.itemsize
            yield theirs, size, lambda parts=parts: joined(parts)

    with _cleared(to):
        try:
            os.makedirs(to, exist_ok=True)
        except OSError as error:
            raise SaveError(f"{to} cannot be made a folder ({error.strerror})") from error
        written = safetensors_file.write(to, tensors())
    for name in _BESIDE:
        if os.path.exists(os.path.join(folder, name)):
            _copy(os.path.join(folder, name), os.path.join(to, name))
    values = configs.json_object(config_path)
    values |= {key: dtype for key in _DTYPE_KEYS if key in values}
    written.append(os.path.join(to, configs.FILE))
    write_whole(written[-1], (json.dumps(values, indent=2) + "\n").encode())
    return [f"{len(weights)} weights of {path}, as {dtype}: {', '.join(written)}"]


def _as_in(files: TensorFiles, weights: Sequence[Weight], config: Config) -> list[Weight]:
    """Weights by the names that files have, after all of them were found right."""
    try:
        found = names.as_in(files.names, weights, config)
    except WeightsError as error:
        raise WeightsError(f"{files.path}: {error}") from error
    for weight in found:
        files.check(weight.theirs, weight.there)
    if config.tied and names.HEAD in files.names:
        table = names.table_of(found)
        files.check(names.HEAD, table.there)
        if not np.array_equal(files.read(names.HEAD), files.read(table.theirs)):
            raise WeightsError(
                f"{files.path}: {names.HEAD!r} is not {table.theirs!r}, but by config.json they "
                'are one; if they are two, write "tie_word_embeddings": false there'
            )
    return found


def _cast(value: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    wrong = value.size - np.count_nonzero(np.isfinite(value))
    if wrong:
        raise WeightsError(
            f"tensor {name!r} has {wrong:,} of {value.size:,} numbers that are not finite (NaN or "
            "infinity), with which no logit is a number; take weights that are whole"
        )
    with np.errstate(over="ignore"):
        found = value.astype(dtype)
    if not np.isfinite(found).all():
        wider = "give --dtype=float32" if dtype.itemsize < 4 else "no --dtype is wider"
        raise WeightsError(
            f"tensor {name!r} has numbers that are too large for {dtype.name}; {wider}"
        )
    return found


def _write(path: str, files: TensorFiles, weights: Sequence[Weight], note: Any, dtype: str) -> None:
    """Writes the checkpoint, tensor by tensor."""
    import tensorflow as tf

    from pipemesh.checkpoint.conversion import write

    wanted = DTYPES[_OF_DTYPE[dtype]]

    def get(weight: Weight) -> tf.Tensor:
        value = weight.from_theirs(files.read(weight.theirs, weight.index))
        with tf.device("CPU:0"):
            return tf.constant(np.ascontiguousarray(_cast(value, wanted, weight.theirs)))

    step = ("global_step", lambda: tf.zeros([], tf.int64))
    tensors = ((weight.name, lambda weight=weight: get(weight)) for weight in weights)
    write(path, [step, *tensors], 0, note)
    list_for_tensorflow(os.path.dirname(path), [os.path.basename(path)])


def _note_of(logdir: str, config: Config, model: str | None) -> dict[str, Any]:
    """What the manifest notes: the model, as a training of it would, and that there is no more."""
    # First: on some systems lingvo cannot be loaded without it.
    import pipemesh.layers  # noqa: F401  # isort: skip
    from pipemesh.training.registered import RegisteredModel, find_model
    from pipemesh.training.saving import WEIGHTS_ONLY

    from .params import MODELS, PretrainedParams

    name = model or MODELS[config.model_type]
    if "" not in sys.path and os.getcwd() not in sys.path:
        # As `python -m` has it.
        sys.path.insert(0, os.getcwd())
    found = find_model(name)
    if not issubclass(found, PretrainedParams):
        raise WeightsError(
            f"--model={name!r} takes no weights of others; give {MODELS[config.model_type]}, or a "
            "class that is derived from it"
        )
    params = found()
    params.LOGDIR = logdir
    if params.CONFIG is None:
        # The folder has no file yet.
        params.CONFIG = config
    return {**RegisteredModel(params, name).note(), "flags": {"model": name}, WEIGHTS_ONLY: True}


@contextlib.contextmanager
def _cleared(folder: str) -> Iterator[None]:
    """Removes a folder that is made in the meantime, if an error leaves it empty."""
    is_new = not os.path.lexists(folder)
    try:
        yield
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        raise


def _check_leftover(path: str, to: str) -> None:
    """Checks that a folder has no file of another model, which would be taken for this one's.

    Args:
        path: of a file beside the weights, if there is one.
        to: where it is copied to.

    Raises:
        CheckpointError: another file is there.
    """
    if not os.path.lexists(to):
        return
    if not os.path.exists(path):
        raise CheckpointError(
            f"{to} is there, but there is no {path}; remove it, give another --logdir, or put it "
            "beside the weights if it belongs to them"
        )
    if not os.path.isfile(to) or not filecmp.cmp(path, to, shallow=False):
        raise CheckpointError(
            f"{to} is there, and is not the same as {path}; remove it, or give another --logdir"
        )


def _copy(path: str, to: str) -> None:
    try:
        shutil.copyfile(path, to)
    except OSError as error:
        raise SaveError(f"{path} cannot be copied to {to} ({error.strerror})") from error


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
