"""Any tf.data dataset of batches as an input of lingvo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from lingvo.core import base_input_generator, datasource, py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import with_article

_TUPLE = ("inputs", "labels", "weights")


def as_batch(element: Any) -> Any:
    """A batch as lingvo has it.

    Args:
        element: a NestedMap or dict; or a tuple (inputs, labels) or (inputs, labels, weights).

    Returns:
        A NestedMap; of a tuple, with `inputs`, `labels` and, if there are some, `weights`.

    Raises:
        PipelineError: it is something else.

    Example:
        >>> sorted(as_batch((tf.zeros([2, 3]), tf.zeros([2]))))
        ['inputs', 'labels']
    """
    if isinstance(element, tuple) and len(element) in (2, 3):
        element = dict(zip(_TUPLE, element, strict=False))
    if not isinstance(element, Mapping):
        raise PipelineError(
            f"a batch is {with_article(type(element).__name__)}; it must be a NestedMap, a dict, "
            "or a tuple (inputs, labels) or (inputs, labels, weights)"
        )
    return py_utils.NestedMap.FromNestedDict(element)


class DatasetInput(base_input_generator.BaseInputGenerator):
    """Batches of a `tf.data.Dataset`, for training without end, for evaluation one epoch.

    Elements are whole batches: NestedMaps, dicts, or tuples (inputs, labels) or (inputs, labels,
    weights), which become NestedMaps with these names. Nothing is added to what the dataset does:
    no batching, shuffling or repeating. lingvo evaluates all of a dataset that ends: it says so by
    `tf.errors.OutOfRangeError`, and begins again after `Reset(sess)`. To go on from a saved
    iterator, all that a dataset does must be a function of its state: give seeds to what is random.

    `batch_size` is only for lingvo's count of examples a second.

    Example:
        >>> def squares():
        ...     x = tf.range(8.0)
        ...     return tf.data.Dataset.from_tensor_slices((x, x**2)).batch(4)
        >>> params = DatasetInput.Params().Set(name="squares", dataset=squares)
        >>> [batch.labels.numpy().tolist() for batch in params.Instantiate().Dataset()]
        [[0.0, 1.0, 4.0, 9.0], [16.0, 25.0, 36.0, 49.0]]
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines `dataset`."""
        p = super().Params()
        p.resettable = True
        # All of it, unless it is said how much.
        p.eval_samples_per_summary = 0
        p.Define(
            "dataset",
            None,
            "A function without arguments that returns a tf.data.Dataset of batches.",
        )
        return p

    def CreateDatasource(self) -> None:
        """Reads by `Dataset`, which lingvo calls when it wants the first batch."""
        self.CreateChild("datasource", DatasetSource.Params())
        self.datasource.SetInputGenerator(self)

    def Dataset(self) -> tf.data.Dataset:
        """The dataset, of NestedMaps.

        Raises:
            PipelineError: `dataset` is no function that returns one.
        """
        p = self.params
        if not callable(p.dataset):
            raise PipelineError(
                f"{p.name}: dataset is {p.dataset!r}; give a function without arguments that "
                "returns a tf.data.Dataset of batches"
            )
        dataset = p.dataset()
        if not isinstance(dataset, tf.data.Dataset):
            raise PipelineError(
                f"{p.name}: dataset() returned {with_article(type(dataset).__name__)}; it must "
                "return a tf.data.Dataset of batches"
            )
        return dataset.map(lambda *element: as_batch(element if element[1:] else element[0]))

    def Reset(self, sess: Any = None) -> None:
        """Starts again from the first batch."""
        self.datasource.Reset(sess)


class DatasetSource(datasource.TFDatasetSource):
    """Hands the dataset of a `DatasetInput` to lingvo."""

    def GetDataset(self) -> tf.data.Dataset:
        """The dataset, of NestedMaps.

        Raises:
            PipelineError: see `DatasetInput.Dataset`; several hosts want a part each.
        """
        generator: Any = self._input_generator
        if self.num_hosts > 1:
            raise PipelineError(
                f"{generator.params.name}: a DatasetInput has no parts for "
                f"{self.num_hosts} hosts; leave use_per_host_infeed off"
            )
        return generator.Dataset()
