"""Training and held-out data: datasets of lingvo inputs, and batches with a position in them."""

from __future__ import annotations

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip


import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import datasource, py_utils

from pipemesh.backend.cluster import task_of
from pipemesh.backend.devices import device_of_scope
from pipemesh.backend.saved_state import device_of_iterator, iterator_state
from pipemesh.checkpoint.reader import reason, restore
from pipemesh.errors import CheckpointError, DataError, PipemeshError
from pipemesh.training.subject import SOURCE

# Methods with which a generator changes batches, if it overrides them.
_OF_GENERATORS = ("_InputBatch", "_PreprocessInputBatch", "GetPreprocessedInputBatch")


def training_dataset(params: Any) -> tuple[tf.data.Dataset, Sequence[str]]:
    """Returns an endless dataset of an input generator, and its `bprop_variable_filters`; with
    filters, one for each source, batches have `SOURCE`.
    """
    filters: list[str] = []
    dataset = _dataset(params, filters)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        return dataset, filters
    return dataset.repeat(), filters


def heldout_batches(params: Any) -> Iterable[Any]:
    """Returns the batches of one epoch of an input generator."""
    dataset = _dataset(params)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        # Not a `TFDatasetSource`: it is called until it has given `num_samples` examples.
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
    if "batch_size" in params:
        return params.batch_size
    limits = {*params.bucket_batch_limit} if "bucket_batch_limit" in params else set()
    return limits.pop() if len(limits) == 1 else 0


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

    if task_of(device_of_scope()) is not None:
        raise DataError(
            f"{_called(params)} is no tf.data dataset, and workers have no operations of lingvo; "
            "leave --read_data=workers out"
        )

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
    methods = [getattr(type(generator), name) for name in _OF_GENERATORS]
    return type(source).GetNext is not datasource.TFDatasetSource.GetNext or any(
        not function.__module__.startswith("lingvo.core.") for function in methods
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


# The name of the data position in checkpoints.
NAME = "data/batches"


class Batches:
    """Batches of an endless dataset.

    TensorFlow's iterator never recovers from an error, and is saved as failed. This also holds for
    an iterator that failed while reading ahead. So after an error `iterator` is replaced by an
    earlier copy, and `skip` counts the batches read since then.

    Args:
        dataset: an endless dataset. If its state is not all in the iterator, a resumed run reads it
            from the beginning.
        read_ahead: number of batches to prefetch.
        check: is called with an error of reading; it raises a better one, if it has one.

    Attributes:
        dataset: the dataset that is read.
        iterator: the iterator that a checkpoint saves under `NAME`.
        skip: number of batches read since the position of `iterator`.

    Example:
        >>> batches = Batches(tf.data.Dataset.range(1000))
        >>> [int(batches.next()) for _ in range(3)]
        [0, 1, 2]
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        read_ahead: int = 0,
        check: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        self._check = check
        self._tuned, self.dataset, self._read_ahead = dataset, _untuned(dataset), read_ahead
        self.iterator: Any = iter(self.dataset)
        self.skip = 0
        # Checkpoints that store a position in the data (None is the beginning), the newest last,
        # with the number of batches read since.
        self._places: dict[str | None, int] = {None: 0}

    @functools.cached_property
    def is_restorable(self) -> bool:
        """Returns whether the position can be saved: no state lies outside the iterator."""
        try:
            iterator_state(self.iterator)
        except tf.errors.OpError:
            return False
        return True

    def go_to(self, checkpoint: str, skip: int = 0) -> None:
        """Moves to the position in a checkpoint.

        Args:
            checkpoint: path of the checkpoint.
            skip: number of batches to skip after that position.

        Raises:
            CheckpointError: the checkpoint has no position in this dataset.
            DataError: the data cannot be read.
        """
        try:
            restore(checkpoint, {NAME: self.iterator})
        except CheckpointError:
            # Earlier releases saved positions of the tuned dataset, which has other iterators.
            self.iterator = iter(self._tuned)
            restore(checkpoint, {NAME: self.iterator})
            self.dataset = self._tuned
        self._places = {checkpoint: 0}
        for _ in range(skip):
            self.next()

    def saved(self, checkpoint: str) -> None:
        """Notes that a checkpoint has, or will have, the current position."""
        self._places = {
            known: read for known, read in self._places.items() if known is None or _exists(known)
        }
        self._places[checkpoint] = self.skip

    def next(self) -> Any:
        """Returns the next batch.

        Raises:
            DataError: the data cannot be read; `iterator` and `skip` describe where to resume.
        """
        try:
            # Sparse tensors are made of others here.
            with tf.device(device_of_iterator(self.iterator)):
                batch = next(self.iterator)
            for leaf in tf.nest.flatten(batch, expand_composites=True):
                # A worker answers before it has read; the shape waits for it, and has its error.
                _ = leaf.shape
        except (tf.errors.OpError, StopIteration) as error:
            self._check(error)
            again = " any more" if any(self._places.values()) else ""
            self._go_back()
            why = "it has ended" if isinstance(error, StopIteration) else reason(error)
            raise DataError(f"the data to train on cannot be read{again} ({why})") from error
        for path in self._places:
            self._places[path] += 1
        return batch

    def _go_back(self) -> None:
        """Replaces the iterator by one restored from a position before the failure."""
        places = [(path, read) for path, read in self._places.items() if not path or _exists(path)]
        certain = [place for place in places if place[1] >= self._read_ahead]
        # Take the newest position that certainly precedes the failure, or else the oldest.
        for path, read in [*certain[::-1], *places[:1]]:
            iterator = iter(self.dataset)
            # The checkpoint may have been deleted or damaged.
            with contextlib.suppress(CheckpointError):
                if path:
                    restore(path, {NAME: iterator})
                self.iterator, self.skip = iterator, read
                return


def _untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset with a fixed number of threads, unless its options say otherwise.

    TensorFlow tunes them in a thread that sleeps up to 60 s. To free an iterator it waits for that
    thread, with Python's lock held.
    """
    options = dataset.options()
    if options.autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _exists(checkpoint: str) -> bool:
    return os.path.exists(f"{checkpoint}.index")
