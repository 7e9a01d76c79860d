"""AdamW: Adam with weight decay that is no part of the gradient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import optimizer

from pipemesh.errors import PipelineError
from pipemesh.layers.optimizers.pieces import is_listed, weight_name

# Parts of the names of norms, biases and embeddings, in named layers, in lingvo and in Keras.
NOT_DECAYED = (
    r"(^|/)(b|b_\w+|\w*bias(_\d+)?|beta|gamma|scale|ln|\w*norm\w*|table|positions|\w*emb\w*)(/|$)"
)


class AdamW(optimizer.Base):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019).

    A step multiplies each weight by 1 - learning rate x `weight_decay`, then updates it by Adam.
    Each step equals that of `torch.optim.AdamW`. By default norms, biases and embeddings do not
    decay, and the matrices that layers with named dims list in `Matrices` do, whatever their names.

    Example:
        >>> from lingvo.core import learner
        >>> params = AdamW.Params().Set(weight_decay=0.1, weight_decay_except="bias|norm")
        >>> params = learner.Learner.Params().Set(name="loss", optimizer=params)
    """

    right_on_slices = True

    @classmethod
    def Params(cls) -> Any:
        """Defines `beta1`, `beta2`, `epsilon`, `weight_decay` and `weight_decay_except`."""
        p = super().Params()
        p.Define("beta1", 0.9, "Share of the mean of gradients that a step keeps.")
        p.Define("beta2", 0.999, "Share of the mean of their squares that a step keeps.")
        p.Define("epsilon", 1e-8, "Added to the root of the mean of squares.")
        p.Define("weight_decay", 0.01, "Decay of a weight, as a multiple of the learning rate.")
        p.Define(
            "weight_decay_except",
            NOT_DECAYED,
            "Regular expression of logical names, such as 'stack/block/attention/b_q': weights in "
            "whose names it is found do not decay. '' lets all decay.",
        )
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        checked_pattern("weight_decay_except", self.params.weight_decay_except)

    def GetOptimizer(self, lr: Any) -> Any:
        """Makes TensorFlow's optimizer; `lr` is the learning rate or a function that returns it."""
        return AdamWOptimizer(lr, self.params)


def checked_pattern(param: str, pattern: str) -> re.Pattern[str] | None:
    """Returns a compiled pattern, or None if it is empty; raises PipelineError if it is invalid."""
    try:
        return re.compile(pattern) if pattern else None
    except re.error as error:
        raise PipelineError(
            f"{param}={pattern!r} is no regular expression ({error}); write one such as 'bias|norm'"
        ) from error


def is_found(pattern: re.Pattern[str] | None, variable: tf.Variable, default: str) -> bool:
    """Returns whether a pattern is in a weight's name; the default finds no matrix that a layer
    lists.
    """
    if pattern is None or (pattern.pattern == default and is_listed(variable)):
        return False
    return pattern.search(weight_name(variable)) is not None


class AdamWOptimizer(tf.compat.v1.train.AdamOptimizer):
    """TensorFlow's optimizer of `AdamW`."""

    def __init__(self, lr: Any, params: Any) -> None:
        super().__init__(lr, params.beta1, params.beta2, params.epsilon, name=params.name)
        self._weight_decay = params.weight_decay
        self._kept = checked_pattern("weight_decay_except", params.weight_decay_except)

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        super()._create_slots(var_list)
        if self._kept is None or self._kept.pattern == NOT_DECAYED or not self._weight_decay:
            return
        names = [weight_name(variable) for variable in var_list]
        if not any(map(self._kept.search, names)):
            raise PipelineError(
                f"weight_decay_except={self._kept.pattern!r} is found in none of the "
                f"{len(set(names))} trained weights, such as {names[0]!r} and {names[-1]!r}; give "
                "a regular expression of such names, or '' to let all decay"
            )

    def _decay_of(self, variable: tf.Variable) -> float:
        return 0.0 if is_found(self._kept, variable, NOT_DECAYED) else self._weight_decay

    def _prepare(self) -> None:
        super()._prepare()
        # TensorFlow adds epsilon to the root of the mean before the bias correction, torch after
        # it.
        _, power = self._get_beta_accumulators()
        self._epsilon_t = self._epsilon_t * tf.sqrt(1.0 - tf.cast(power, self._epsilon_t.dtype))

    def _resource_apply_dense(self, grad: Any, var: tf.Variable) -> Any:
        decay, decayed = self._decay_of(var), []
        if decay:
            rate = tf.cast(self._lr_t, var.dtype)
            # Else it would decay before the step: also in a step that fails, and in a copy, while
            # the old values are in use.
            with tf.control_dependencies([grad]):
                decayed = [var.assign_sub(rate * decay * var)]
        with tf.control_dependencies(decayed):
            return super()._resource_apply_dense(grad, var)

    def _resource_apply_sparse_duplicate_indices(
        self, grad: Any, handle: tf.Variable, indices: Any
    ) -> Any:
        # All rows decay.
        sizes = tf.shape(handle, out_type=indices.dtype)
        whole = tf.convert_to_tensor(tf.IndexedSlices(grad, indices, sizes))
        return self._resource_apply_dense(whole, handle)
