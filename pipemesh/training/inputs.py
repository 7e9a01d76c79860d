"""The inputs of lingvo as datasets, so that their place can be saved."""

from __future__ import annotations

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from lingvo.core import datasource, py_utils

from pipemesh.errors import DataError, PipemeshError

# Where a generator does something to batches, if it is its own.
_OF_GENERATORS = ("_InputBatch", "_PreprocessInputBatch", "GetPreprocessedInputBatch")


def training_dataset(params: Any) -> tf.data.Dataset:
    """Batches of an input generator, without end.

    Args:
        params: of the input generator. Where it has a `TFDatasetSource` its dataset is read, which
            begins again after its end; others are asked for one batch after the other.

    Raises:
        DataError: the generator cannot be made.
    """
    dataset = _dataset(params)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        return dataset
    return dataset.repeat()


def heldout_batches(params: Any) -> Iterable[Any]:
    """Batches of an input generator, one epoch.

    Args:
        params: of the input generator. Without a `TFDatasetSource` it is asked for batches until
            it has given `num_samples` examples.

    Raises:
        DataError: the generator cannot be made, or has no end.
    """
    dataset = _dataset(params)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        samples = params.num_samples if "num_samples" in params else 0
        size = params.batch_size if "batch_size" in params else 0
        if not (samples and size):
            raise DataError(
                f"input {params.name!r} ({params.cls.__name__}) gives batches without end, so "
                "nobody knows when all were seen; let it end, set its num_samples and batch_size, "
                "or judge by nothing with --dataset=none"
            )
        return dataset.take(-(-samples // size))
    return dataset


def _dataset(params: Any) -> tf.data.Dataset:
    generator = _made(params)
    source = generator.children.get("datasource", None)
    if isinstance(source, datasource.TFDatasetSource) and not _has_own_ways(generator, source):
        with py_utils.GlobalStepContext(None):
            # Hidden from functions of the dataset, as lingvo has it.
            dataset: Any = source.GetDataset()
        options = tf.data.Options()
        # The order must not depend on who is faster.
        options.deterministic = True
        return dataset.with_options(options)

    def batch(_: tf.Tensor) -> Any:
        return generator.GetPreprocessedInputBatch()

    return tf.data.Dataset.from_tensors(0).repeat().map(batch)


def _has_own_ways(generator: Any, source: Any) -> bool:
    """Whether batches are more than what the dataset has."""
    own = [getattr(type(generator), name) for name in _OF_GENERATORS]
    return type(source).GetNext is not datasource.TFDatasetSource.GetNext or any(
        not function.__module__.startswith("lingvo.core.") for function in own
    )


def _made(params: Any) -> Any:
    try:
        return params.Instantiate()
    except PipemeshError:
        raise
    except Exception as error:
        raise DataError(
            f"input {params.name!r} ({params.cls.__name__}) cannot be made: "
            f"{type(error).__name__}: {error}"
        ) from error
