"""Import of `transformers` weights into a checkpoint, and export of a checkpoint."""

from __future__ import annotations

import contextlib
import filecmp
import functools
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipemesh.checkpoint import Folder, Manifest, newest
from pipemesh.checkpoint.files import write_whole
from pipemesh.checkpoint.folder import list_for_tensorflow, path_of
from pipemesh.checkpoint.manifest import WEIGHTS_ONLY
from pipemesh.commands import process
from pipemesh.errors import CheckpointError, PipemeshError, SaveError
from pipemesh.training.learning import fall_later

from . import adapters, names, safetensors_file, tokenizer
from . import config as configs
from .families import Config
from .names import Weight
from .safetensors_file import BLOCK, DTYPES, Tensor, TensorFiles
from .values import WeightsError, json_object

# Files beside weights that are copied with them.
_BESIDE = (*tokenizer.FILES, "vocab.json", "merges.txt", configs.GENERATION)
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
    paths = {configs.FILE: config_path, **{name: os.path.join(beside, name) for name in _BESIDE}}
    for path in (source, *paths.values()):
        # A pipe would wait for ever, and a device may have no end.
        if os.path.exists(path) and not os.path.isfile(path):
            raise WeightsError(f"{path!r} is no regular file; give one, or remove it")
    config = configs.read(config_path)
    _, notes = configs.ends_of(beside, config)
    with TensorFiles(source) as files:
        if config.num_layers > len(files.names):
            raise WeightsError(
                f"{config_path} has {config.num_layers:,} layers, but {source} has "
                f"{len(files.names):,} tensors; the two are of different models"
            )
        weights = _as_in(files, names.weights_of(config), config)
        found = tokenizer.load(beside, config)
        note = _note_of(logdir, config, model)
        with _cleared(logdir), Folder(logdir), contextlib.ExitStack() as undo:
            if there := newest(logdir):
                raise CheckpointError(
                    f"{logdir!r} has a checkpoint, {there}; give another --logdir"
                )
            for name, path in paths.items():
                to = os.path.join(logdir, name)
                _check_leftover(path, to)
                if os.path.exists(path) and not os.path.exists(to):
                    undo.callback(_remove, to)
                    shutil.copyfile(path, to)
            path = path_of(logdir, 0)
            _write(path, files, weights, note, dtype)
            undo.pop_all()
    sizes = {weight.name: math.prod(weight.shape) for weight in weights}
    numbers = sum(sizes.values())
    told = f"{path}: {len(sizes)} weights of {source} ({config.model_type}), {numbers:,} numbers"
    spelled = (
        f"tokenizer: {found.path}"
        if found
        else (
            f"no tokenizer: beside the weights is neither {tokenizer.JSON} nor "
            f"{tokenizer.SENTENCEPIECE}, so `pipemesh decode` takes --ids alone; if there are "
            f"other files of one, {tokenizer.SAVE}"
        )
    )
    unused = names.unused_in(files.names, config)
    left = [f"left out, as the model does not use them: {', '.join(unused)}"] if unused else []
    return [told, spelled, *left, *(found.notes if found else ()), *config.notes, *notes]


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
    only_adapters = has_adapters and not merged
    new = (adapters.CONFIG, adapters.FILE)
    if not only_adapters:
        new = (safetensors_file.ONE, safetensors_file.INDEX, configs.FILE, *_BESIDE)
    for name in sorted(os.listdir(to)) if os.path.isdir(to) else ():
        if name in new or (name.endswith(".safetensors") and not only_adapters):
            raise SaveError(f"{os.path.join(to, name)} exists; give another folder")
    wanted = DTYPES[_OF_DTYPE[dtype]]

    # The tensors of all experts come from one weight, one after the other.
    of_experts = functools.lru_cache(maxsize=1)(source.read)

    def read(weight: Weight) -> np.ndarray:
        return (source.read if weight.expert is None else of_experts)(weight.name)

    def blocks(parts: Sequence[Weight]) -> Iterator[np.ndarray]:
        whole = names.joined(parts, map(read, parts))
        for rows in _rows(whole):
            yield _cast(whole[rows], wanted, parts[0].theirs)

    tensors = [
        Tensor(theirs, wanted, parts[0].there, lambda parts=parts: blocks(parts))
        for theirs, parts in names.by_theirs(weights)
    ]

    with _cleared(to), contextlib.ExitStack() as undo:
        os.makedirs(to, exist_ok=True)
        for name in new:
            undo.callback(_remove, os.path.join(to, name))
        if only_adapters:
            kind = config.kind
            written = adapters.write(
                source, weights, to, kind, lambda v, name: _cast(v, wanted, name)
            )
            told = f"adapters of {path}"
        else:
            written = safetensors_file.write(to, tensors)
            for each in written:
                undo.callback(_remove, each)
            for name in _BESIDE:
                if os.path.exists(os.path.join(folder, name)):
                    shutil.copyfile(os.path.join(folder, name), os.path.join(to, name))
            values = json_object(config_path)
            values |= {key: dtype for key in _DTYPE_KEYS if key in values}
            # The last one: without it a folder has no model.
            written.append(os.path.join(to, configs.FILE))
            write_whole(written[-1], (json.dumps(values, indent=2) + "\n").encode())
            told = f"{len({weight.name for weight in weights})} weights of {path}"
        undo.pop_all()
    return [f"{told}, as {dtype}: {', '.join(written)}"]


def _as_in(files: TensorFiles, weights: Sequence[Weight], config: Config) -> list[Weight]:
    """Returns the weights with the names in files, after all checks."""
    try:
        found = names.as_in(files.names, weights, config)
    except WeightsError as error:
        raise WeightsError(f"{files.path}: {error}") from error
    for weight in found:
        files.check(weight.theirs, weight.there)
    by_name = {weight.name: weight for weight in found}
    for copy, name in names.copies_of(config).items():
        if copy not in files.names:
            continue
        weight = by_name[name]
        files.check(copy, weight.there)
        # Two dtypes have blocks of different sizes.
        for rows, block in files.blocks(copy):
            index = (rows, *[slice(None)] * (len(weight.there) - 1))
            if not np.array_equal(block, files.read(weight.theirs, index)):
                raise WeightsError(
                    f"{files.path}: {copy!r} is not {weight.theirs!r}, but by config.json they "
                    'are one; if they are two, write "tie_word_embeddings": false there'
                )
    return found


def _rows(value: np.ndarray) -> Iterator[slice]:
    """Yields the rows of a value in blocks, so that no whole copy is made."""
    number = max(1, BLOCK * len(value) // max(1, value.nbytes))
    for first in range(0, len(value), number):
        yield slice(first, first + number)


def _cast(value: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    if not np.isfinite(value).all():
        raise WeightsError(
            f"tensor {name!r} has numbers that are not finite (NaN or infinity), with which no "
            "logit is a number; take weights that are whole"
        )
    if np.can_cast(value.dtype, dtype):
        return value.astype(dtype, copy=False)
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

    def get(parts: Sequence[Weight]) -> tf.Tensor:
        found = _aligned(parts[0].shape, wanted)
        for part in parts:
            own = part.as_theirs(found)
            for rows, block in files.blocks(part.theirs, part.index, part.grouped):
                own[rows] = _cast(block, wanted, part.theirs)
        # `tf.constant` copies, twice; NumPy's way out of its memory has no bfloat16.
        bits = found.view(f"u{found.itemsize}")
        with tf.device("CPU:0"):
            return tf.bitcast(tf.experimental.dlpack.from_dlpack(bits.__dlpack__()), dtype)

    step = ("global_step", lambda: tf.zeros([], tf.int64))
    tensors = ((name, lambda parts=parts: get(parts)) for name, parts in names.by_ours(weights))
    write(path, [step, *tensors], 0, note)
    list_for_tensorflow(os.path.dirname(path), [os.path.basename(path)])


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an array that begins at a multiple of 64 bytes, which TensorFlow uses uncopied."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _note_of(logdir: str, config: Config, model: str | None) -> dict[str, Any]:
    """Returns the note of the manifest: the model, as in a run, and that there are only weights."""
    # Import this first: on some systems lingvo cannot load without it.
    import pipemesh.layers  # noqa: F401  # isort: skip
    from pipemesh.training.registered import RegisteredModel, find_model

    from .params import MODELS, PretrainedParams

    name = model or MODELS[config.model_type]
    process.look_here()
    found = find_model(name)
    if not issubclass(found, PretrainedParams):
        raise WeightsError(
            f"--model={name!r} takes no weights of others; give {MODELS[config.model_type]}, or a "
            "class that is derived from it"
        )
    params = found()
    # Data is no part of weights, and may come later.
    params.LOGDIR, params.TRAIN_DATA = logdir, None
    fall_later(params)
    if params.CONFIG is None:
        # The folder has no file yet.
        params.CONFIG = config
    return {**RegisteredModel(params, name).note(), "flags": {"model": name}, WEIGHTS_ONLY: True}


@contextlib.contextmanager
def _cleared(folder: str) -> Iterator[None]:
    """Removes a folder that the block creates, if an error leaves it empty; an OSError becomes a
    SaveError.
    """
    is_new = not os.path.lexists(folder)
    try:
        yield
    except BaseException as error:
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        if isinstance(error, OSError) and not isinstance(error, PipemeshError):
            raise SaveError(f"{error}, so {folder} is not written") from error
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


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
