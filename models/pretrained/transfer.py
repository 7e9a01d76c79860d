"""Import of `transformers` weights into a checkpoint, and export of a checkpoint."""

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

from . import adapters, names, safetensors_file, tokenizer
from . import config as configs
from .config import Config, WeightsError
from .names import Weight
from .safetensors_file import DTYPES, TensorFiles

# Files beside weights that are copied with them.
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
# Keys for the dtype of weights in a file.
_DTYPE_KEYS = ("dtype", "torch_dtype")
_OF_DTYPE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def import_weights(
    source: str,
    logdir: str,
    config_path: str | None = None,
    model: str | None = None,
    dtype: str = "float32",
) -> list[str]:
    """Creates a log directory whose first checkpoint has the weights of a safetensors file or
    index.

    By default the `config.json` beside the weights is used, and determines the model class. `model`
    is a `package.module.Class` in `params` or derived from one. `dtype` is that of the checkpoint;
    a run casts weights to its own. It returns lines for the user. Unusable weights or files raise
    WeightsError, a used log directory CheckpointError, and a failed write SaveError.
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


def export_weights(path: str, to: str, dtype: str = "float32", merged: bool = False) -> list[str]:
    """Writes the weights of an imported model's checkpoint as files for `transformers`; returns
    lines.

    Of a checkpoint with adapters these alone are written, as files for `peft`, unless `merged`.
    The folder is created if it is missing, and must have no weights yet. Another model's checkpoint
    raises CheckpointError, a failed write SaveError.
    """
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
    source = adapters.Weights(path)
    has_adapters, shapes = source.base != path, source.shapes
    if merged and not has_adapters:
        raise CheckpointError(f"--merged: {path} has no adapters to be merged; leave it out")
    for weight in weights:
        if tuple(shapes.get(weight.name, ())) != weight.shape:
            has = f"has it as {shapes[weight.name]}" if weight.name in shapes else "has none"
            raise CheckpointError(
                f"{path} is of another model than {config_path}, which says that {weight.name!r} "
                f"has shape {list(weight.shape)}: it {has}"
            )
    written_names = (safetensors_file.ONE, safetensors_file.INDEX, configs.FILE, *_BESIDE)
    only_adapters = has_adapters and not merged
    for name in (adapters.CONFIG, adapters.FILE) if only_adapters else written_names:
        if os.path.lexists(os.path.join(to, name)):
            raise SaveError(f"{os.path.join(to, name)} exists; give another folder")
    wanted = DTYPES[_OF_DTYPE[dtype]]

    def joined(parts: Sequence[Weight]) -> np.ndarray:
        whole = names.joined(parts, [source.read(weight.name) for weight in parts])
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
        if only_adapters:
            written = adapters.write(source, weights, to, lambda v, name: _cast(v, wanted, name))
            return [f"adapters of {path}, as {dtype}: {', '.join(written)}"]
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
    """Returns the weights with the names in files, after all checks."""
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
    """Returns the note of the manifest: the model, as in a run, and that there are only weights."""
    # Import this first: on some systems lingvo cannot load without it.
    import pipemesh.layers  # noqa: F401  # isort: skip
    from pipemesh.training.registered import RegisteredModel, find_model
    from pipemesh.training.saving import WEIGHTS_ONLY

    from .params import MODELS, PretrainedParams

    name = model or MODELS[config.model_type]
    if "" not in sys.path and os.getcwd() not in sys.path:
        # As `python -m` does.
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
    """Removes a folder that the block creates, if an error leaves it empty."""
    is_new = not os.path.lexists(folder)
    try:
        yield
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        raise


def _check_leftover(path: str, to: str) -> None:
    """Raises CheckpointError if `to` has a different file than `path`, from another model."""
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
