"""A tf.data dataset of batches as a lingvo input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from lingvo.core import base_input_generator, datasource, py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import with_article

_TUPLE = ("inputs", "labels", "weights")


def as_batch(element: Any) -> Any:
    """Converts a batch to a NestedMap; a tuple gets the names `inputs`, `labels` and `weights`."""
    if isinstance(element, tuple) and len(element) in (2, 3):
        element = dict(zip(_TUPLE, element, strict=False))
    if not isinstance(element, Mapping):
        raise PipelineError(
            f"a batch is {with_article(type(element).__name__)}; it must be a NestedMap, a dict, "
            "or a tuple (inputs, labels) or (inputs, labels, weights)"
        )
    return py_utils.NestedMap.FromNestedDict(element)


class DatasetInput(base_input_generator.BaseInputGenerator):
    """Batches of a `tf.data.Dataset`, without end for training and one epoch for evaluation.

    Elements are whole batches: NestedMaps, dicts, or tuples (inputs, labels) or (inputs, labels,
    weights). Tuples become NestedMaps with these names.

    lingvo evaluates a finite dataset to its end, which raises `tf.errors.OutOfRangeError`. It
    starts again after `Reset(sess)`. To resume from a saved iterator, the dataset must depend on
    its state alone: give seeds to its random operations.

    `batch_size`, if it is set, is the number of examples of a batch: for lingvo's
    examples-per-second metric, and to check a number of microbatches before the model is made.

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
        # The whole dataset, unless the params set a number.
        p.eval_samples_per_summary = 0
        p.Define("dataset", None, "A function that returns a tf.data.Dataset of batches.")
        return p

    def CreateDatasource(self) -> None:
        """Makes the data source, which calls `Dataset` for the first batch."""
        self.CreateChild("datasource", DatasetSource.Params())
        self.datasource.SetInputGenerator(self)

    def Dataset(self) -> tf.data.Dataset:
        """Returns the dataset, with NestedMaps as elements."""
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
    """The source that hands the dataset of a `DatasetInput` to lingvo."""

    def GetDataset(self) -> tf.data.Dataset:
        """Returns the dataset; raises a PipelineError if there are several hosts."""
        generator: Any = self._input_generator
        if self.num_hosts > 1:
            raise PipelineError(
                f"{generator.params.name}: a DatasetInput has no parts for "
                f"{self.num_hosts} hosts; leave use_per_host_infeed off"
            )
        return generator.Dataset()
