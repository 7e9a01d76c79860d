"""Export: a language model as a SavedModel that TensorFlow loads without this library.

Layers with named dims know all sizes before they run. So each row of a request is computed
separately, at the model's whole length; several rows are computed at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from pipemesh.decoding.generator import Generator

# The number of rows computed at the same time.
_ROWS_AT_ONCE = 8


class ExportedModel(tf.Module):
    """A SavedModel with the signatures `score` and `decode`.

    Both take `ids`, int32 `[batch, length]`, with any padding at the ends of rows, and `lengths`,
    int32 `[batch]`. Any batch size is valid, and any length up to the model's.

    * `score` returns `log_probs`, float32 `[batch, length]`: the natural logarithm of every token's
      probability given those before it. It is 0 for the first token, which has no score, and for
      padding.
    * `decode` also takes `max_tokens`, int32. It returns `tokens`, int32 `[batch, max_tokens]`, the
      most likely ones, their `log_probs`, and `counts`, int32 `[batch]`. A count is the number of
      tokens, including the one that ends a row; entries behind it are 0.

    Args:
        compute: returns negative log probabilities, `[1, length]`, of labels. It is called like
            that of `Scorer`, with tensors of one row.
        generator: chooses tokens, with a `Sampler()`.
        length: the positions of a row.
        vocab_size: ids must be below it.

    Raises:
        tf.errors.InvalidArgumentError: in a call with invalid ids, lengths or `max_tokens`.
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
        # Variables of other objects are saved only if this module tracks them.
        variables = [v for s in self._signatures.values() for v in s.variables]
        self.weights = list({v.ref(): v for v in variables}.values())

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the SavedModel.

        Args:
            folder: the target; an existing SavedModel there is replaced.
        """
        # Saves no gradients: TensorFlow lacks those of this library.
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
        tf.saved_model.save(self, os.fspath(folder), self._signatures, options)

    def _score(self, ids: tf.Tensor, lengths: tf.Tensor) -> dict[str, tf.Tensor]:
        ids, lengths, size = self._checked(ids, lengths)
        places = tf.range(self._length)

        def score_row(row: Any) -> tf.Tensor:
            tokens, count = row
            is_scored = tf.cast(places < count - 1, tf.int32)
            labels = tf.concat([tokens[1:], [0]], 0)
            batch = {
                "ids": tokens * is_scored,
                "labels": labels * is_scored,
                "segment_ids": is_scored,
                "segment_pos": places * is_scored,
                "weights": tf.cast(is_scored, tf.float32),
            }
            losses = self._compute({name: value[None] for name, value in batch.items()})
            label_scores = tf.where(is_scored > 0, -tf.reshape(losses, [self._length]), 0.0)
            # The score of a label belongs to the next token.
            return tf.concat([[0.0], label_scores[:-1]], 0)

        log_probs = tf.map_fn(
            score_row,
            (ids, lengths),
            parallel_iterations=_ROWS_AT_ONCE,
            fn_output_signature=tf.TensorSpec([self._length], tf.float32),
        )
        wider = tf.maximum(size - self._length, 0)
        return {"log_probs": tf.pad(log_probs[:, :size], [[0, 0], [0, wider]])}

    def _decode(
        self, ids: tf.Tensor, lengths: tf.Tensor, max_tokens: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        ids, lengths, _ = self._checked(ids, lengths, max_tokens)

        def decode_row(row: Any) -> Any:
            prompt_ids, count = row
            prompt = prompt_ids[None], count[None], tf.zeros([1, 2], tf.int32)
            ((group, first),) = self._generator.begin([0], [prompt], [None])
            _, (rest,) = self._generator.go_on([group], max_tokens - 1)
            tokens, log_probs = (
                tf.concat([one, tf.reshape(more, [-1])], 0)
                for one, more in zip(first, rest, strict=True)
            )
            stop = tf.constant(sorted(self._generator.stop), tf.int32)
            ends = tf.reduce_any(tokens[:, None] == stop, -1)
            is_kept = tf.cumsum(tf.cast(ends, tf.int32), exclusive=True) == 0
            # Padded to a static size: with no rows the number of tokens is unknown.
            filling = [[0, self._length - max_tokens]]
            return (
                tf.ensure_shape(tf.pad(tf.where(is_kept, tokens, 0), filling), [self._length]),
                tf.ensure_shape(tf.pad(tf.where(is_kept, log_probs, 0.0), filling), [self._length]),
                tf.math.count_nonzero(is_kept, dtype=tf.int32),
            )

        tokens, log_probs, counts = tf.map_fn(
            decode_row,
            (ids, lengths),
            parallel_iterations=_ROWS_AT_ONCE,
            fn_output_signature=(
                tf.TensorSpec([self._length], tf.int32),
                tf.TensorSpec([self._length], tf.float32),
                tf.TensorSpec([], tf.int32),
            ),
        )
        tokens, log_probs = tokens[:, :max_tokens], log_probs[:, :max_tokens]
        return {"tokens": tokens, "log_probs": log_probs, "counts": counts}

    def _checked(self, ids: tf.Tensor, lengths: tf.Tensor, more: tf.Tensor | None = None) -> Any:
        """Returns rows of the model's length, their own lengths, and the given length."""
        size = tf.shape(ids)[1]
        # The padding may contain anything.
        ids = tf.where(tf.range(size) < lengths[:, None], ids, 0)
        # TensorFlow would escape an apostrophe.
        too_long = "the tokens of a row, with those to come, exceed the length of the model"
        checks = [
            tf.debugging.assert_less_equal(lengths, self._length, too_long),
            tf.debugging.assert_positive(lengths, "a row is empty"),
            tf.debugging.assert_less_equal(lengths, size, "a row is longer than its ids"),
            tf.debugging.assert_less(ids, self._vocab_size, "a token is not in the vocabulary"),
            tf.debugging.assert_non_negative(ids, "a token is not in the vocabulary"),
            tf.debugging.assert_equal(
                tf.shape(lengths)[0], tf.shape(ids)[0], "lengths must have one number a row"
            ),
        ]
        if more is not None:
            checks.append(tf.debugging.assert_positive(more, "max_tokens is below 1"))
            # A sum of both might overflow int32.
            left = self._length - lengths
            checks.append(tf.debugging.assert_less_equal(more, left, too_long))
        with tf.control_dependencies(checks):
            # Pad or cut to the model's length.
            filling = tf.zeros([tf.shape(ids)[0], self._length], tf.int32)
            ids = tf.concat([ids, filling], 1)[:, : self._length]
            return tf.ensure_shape(ids, [None, self._length]), tf.identity(lengths), size
