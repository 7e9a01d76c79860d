"""A language model as a SavedModel that TensorFlow loads without this library.

Layers with named dims know all sizes before they run, so each row of a request is computed by
itself, at the model's whole length; rows of a request are computed at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from pipemesh.decoding.generator import Generator

# How many rows are under way at the same time.
_ROWS_AT_ONCE = 8


class ExportedModel(tf.Module):
    """What a SavedModel has: signatures `score` and `decode`.

    Both take `ids`, int32 `[batch, length]`, rows that are filled up at their ends by anything,
    and `lengths`, int32 `[batch]`, each up to the model's, for any batch.

    * `score` returns `log_probs`, float32 `[batch, length]`: of every token given those before it,
      natural logarithms; 0 for the first one, of which nothing is said, and behind the end.
    * `decode` takes `max_tokens`, int32, too. It returns `tokens`, int32 `[batch, max_tokens]`, the
      most likely ones, `log_probs` of them, and `counts`, int32 `[batch]`: how many there are, the
      one that ends a row among them; 0 behind these.

    Args:
        compute: gives minus the log probabilities, `[1, length]`, of labels: see `Scorer`, called
            with tensors of one row.
        generator: chooses tokens, with a `Sampler()`.
        length: places a row.
        vocab_size: ids are below it.

    Raises:
        tf.errors.InvalidArgumentError: when it is called with ids, lengths or `max_tokens` that
            the model cannot have.
    """

    def __init__(
        self,
        compute: Callable[[dict[str, Any]], tf.Tensor],
        generator: Generator,
        *,
        length: int,
        vocab_size: int,
    ) -> None:
        super().__init__()
        self._compute, self._generator = compute, generator
        self._length, self._vocab_size = length, vocab_size
        rows = [
            tf.TensorSpec([None, None], tf.int32, name="ids"),
            tf.TensorSpec([None], tf.int32, name="lengths"),
        ]
        steps = tf.TensorSpec([], tf.int32, name="max_tokens")
        self.score = tf.function(self._score, rows, autograph=False)
        self.decode = tf.function(self._decode, [*rows, steps], autograph=False)
        self._signatures = {
            "score": self.score.get_concrete_function(),
            "decode": self.decode.get_concrete_function(),
        }
        # What is saved: variables that belong to somebody else are found by nobody.
        found = [v for each in self._signatures.values() for v in each.variables]
        self.weights = list({v.ref(): v for v in found}.values())

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the SavedModel.

        Args:
            folder: to write to; what a SavedModel has there is replaced.
        """
        # Nobody asks for gradients of it, and those of this library are not in TensorFlow.
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
        tf.saved_model.save(self, os.fspath(folder), self._signatures, options)

    def _score(self, ids: tf.Tensor, lengths: tf.Tensor) -> dict[str, tf.Tensor]:
        ids, lengths, size = self._checked(ids, lengths)
        places = tf.range(self._length)

        def of_row(row: Any) -> tf.Tensor:
            own, count = row
            there = tf.cast(places < count - 1, tf.int32)
            labels = tf.concat([own[1:], [0]], 0)
            batch = {
                "ids": own * there,
                "labels": labels * there,
                "segment_ids": there,
                "segment_pos": places * there,
                "weights": tf.cast(there, tf.float32),
            }
            losses = self._compute({name: each[None] for name, each in batch.items()})
            found = tf.where(there > 0, -tf.reshape(losses, [self._length]), 0.0)
            # That of a label belongs to the token behind.
            return tf.concat([[0.0], found[:-1]], 0)

        found = tf.map_fn(
            of_row,
            (ids, lengths),
            parallel_iterations=_ROWS_AT_ONCE,
            fn_output_signature=tf.TensorSpec([self._length], tf.float32),
        )
        wider = tf.maximum(size - self._length, 0)
        return {"log_probs": tf.pad(found[:, :size], [[0, 0], [0, wider]])}

    def _decode(
        self, ids: tf.Tensor, lengths: tf.Tensor, max_tokens: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        ids, lengths, _ = self._checked(ids, lengths, max_tokens)

        def of_row(row: Any) -> Any:
            own, count = row
            prompt = own[None], count[None], tf.zeros([1, 2], tf.int32)
            ((group, first),) = self._generator.begin([0], [prompt], [None])
            _, (rest,) = self._generator.go_on([group], max_tokens - 1)
            tokens, log_probs = (
                tf.concat([one, tf.reshape(more, [-1])], 0)
                for one, more in zip(first, rest, strict=True)
            )
            ends = tf.zeros_like(tokens)
            for stop in sorted(self._generator.stop):
                ends += tf.cast(tokens == stop, tf.int32)
            there = tf.cumsum(ends, exclusive=True) == 0
            # As many as there may be, since without a row nobody knows how many there are.
            filling = [[0, self._length - max_tokens]]
            return (
                tf.ensure_shape(tf.pad(tf.where(there, tokens, 0), filling), [self._length]),
                tf.ensure_shape(tf.pad(tf.where(there, log_probs, 0.0), filling), [self._length]),
                tf.math.count_nonzero(there, dtype=tf.int32),
            )

        tokens, log_probs, counts = tf.map_fn(
            of_row,
            (ids, lengths),
            parallel_iterations=_ROWS_AT_ONCE,
            fn_output_signature=(
                tf.TensorSpec([self._length], tf.int32),
                tf.TensorSpec([self._length], tf.float32),
                tf.TensorSpec([], tf.int32),
            ),
        )
        found = {"tokens": tokens[:, :max_tokens], "log_probs": log_probs[:, :max_tokens]}
        return {**found, "counts": counts}

    def _checked(self, ids: tf.Tensor, lengths: tf.Tensor, more: tf.Tensor | None = None) -> Any:
        """Rows of the model's length, their own lengths, and the length that was given."""
        size = tf.shape(ids)[1]
        # What fills rows up may be anything.
        ids = tf.where(tf.range(size) < lengths[:, None], ids, 0)
        said = "tokens of a row, and those to come, are more than the model has places for"
        checks = [
            tf.debugging.assert_less_equal(lengths, self._length, said),
            tf.debugging.assert_positive(lengths, "a row is empty"),
            tf.debugging.assert_less_equal(lengths, size, "a row is longer than its ids"),
            tf.debugging.assert_less(ids, self._vocab_size, "a token is not in the vocabulary"),
            tf.debugging.assert_non_negative(ids, "a token is not in the vocabulary"),
            tf.debugging.assert_equal(tf.shape(lengths)[0], tf.shape(ids)[0], "not a length a row"),
        ]
        if more is not None:
            checks.append(tf.debugging.assert_positive(more, "max_tokens is below 1"))
            # A sum of both might be more than an int32 has room for.
            left = self._length - lengths
            checks.append(tf.debugging.assert_less_equal(more, left, said))
        with tf.control_dependencies(checks):
            # As many as there are places, and no more of what is behind the ends.
            filling = tf.zeros([tf.shape(ids)[0], self._length], tf.int32)
            ids = tf.concat([ids, filling], 1)[:, : self._length]
            return tf.ensure_shape(ids, [None, self._length]), tf.identity(lengths), size
