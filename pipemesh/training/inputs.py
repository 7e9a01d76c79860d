"""lingvo's input generators as datasets, so that a checkpoint can store their position."""

from __future__ import annotations

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import datasource, py_utils

from pipemesh.errors import DataError, PipemeshError
from pipemesh.training.subject import SOURCE

# Methods with which a generator changes batches, if it overrides them.
_OF_GENERATORS = ("_InputBatch", "_PreprocessInputBatch", "GetPreprocessedInputBatch")


def training_dataset(params: Any) -> tuple[tf.data.Dataset, Sequence[str]]:
    """Returns an endless dataset of an input generator, and its `bprop_variable_filters`.

    A `TFDatasetSource` is read as a dataset and repeated; other generators are called for each
    batch. If there are filters, one for each source, batches have `SOURCE`. It raises DataError if
    the generator cannot be made, or chooses its data by the global step.
    """
    filters: list[str] = []
    dataset = _dataset(params, filters)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        return dataset, filters
    return dataset.repeat(), filters


def heldout_batches(params: Any) -> Iterable[Any]:
    """Returns the batches of one epoch of an input generator.

    A generator without a `TFDatasetSource` is called until it has given `num_samples` examples. It
    raises DataError if the generator cannot be made, or has no end.
    """
    dataset = _dataset(params)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        samples = params.num_samples if "num_samples" in params else 0
        size = _batch_size(params)
        if not (samples and size):
            raise DataError(
                f"{_called(params)} gives batches without end, so nobody knows when all were seen; "
                "let it end, set its num_samples and batch_size (or a bucket_batch_limit of one "
                "number), or judge by nothing with --dataset=none"
            )
        return dataset.take(-(-samples // size))
    return dataset


def _batch_size(params: Any) -> int:
    """Returns the number of examples in each batch; 0 if unknown."""
    limits = set(params.bucket_batch_limit) if "bucket_batch_limit" in params else set()
    if "batch_size" not in params and len(limits) == 1:
        return limits.pop()
    return params.batch_size if "batch_size" in params else 0


def _dataset(params: Any, filters: list[str] | None = None) -> tf.data.Dataset:
    """Returns a generator's batches, and adds the filters of its sources to `filters`."""
    generator = made(params)
    source = generator.children.get("datasource", None)
    if isinstance(source, datasource.TFDatasetSource) and not _has_own_ways(generator, source):
        with py_utils.GlobalStepContext(None):
            # As in lingvo, functions of the dataset do not see the cluster.
            dataset: Any = source.GetDataset()
        options = tf.data.Options()
        # The order must not depend on the speed of threads.
        options.deterministic = True
        return dataset.with_options(options)

    def batch(_: tf.Tensor) -> Any:
        step = tf.zeros([], tf.int64)
        with py_utils.GlobalStepContext(step):
            found = generator.GetPreprocessedInputBatch()
        if step.consumers():
            goes_by_step.append(True)
        if filters is None or not any(generator.GetBpropVariableFilters()):
            return found
        filters[:] = generator.GetBpropVariableFilters()
        return py_utils.NestedMap({**found, SOURCE: generator.GetInputSourceOneHot()})

    goes_by_step: list[bool] = []
    dataset = tf.data.Dataset.from_tensors(0).repeat().map(batch)
    if goes_by_step:
        raise DataError(
            f"{_called(params)} goes by the global step, as a CurriculumDataSource does, but data "
            "is read ahead of the steps; train with each part of its data in a run of its own"
        )
    return dataset


def _has_own_ways(generator: Any, source: Any) -> bool:
    """Returns whether the generator changes the batches of its dataset."""
    own = [getattr(type(generator), name) for name in _OF_GENERATORS]
    return type(source).GetNext is not datasource.TFDatasetSource.GetNext or any(
        not function.__module__.startswith("lingvo.core.") for function in own
    )


def made(params: Any) -> Any:
    """Makes an input generator; raises DataError if that fails."""
    try:
        return params.Instantiate()
    except PipemeshError:
        raise
    except Exception as error:
        raise DataError(
            f"{_called(params)} cannot be made: {type(error).__name__}: {error}"
        ) from error


def _called(params: Any) -> str:
    return f"input {params.name!r} ({params.cls.__name__})"
