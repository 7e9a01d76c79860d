"""The language model as the subject of a run: its data, its score, its note."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.training.run.console import waiting
from pipemesh.training.subject import Subject, ratio

from . import heldout
from .about import About
from .corpus import Corpus
from .input import PREFETCHED_BATCHES, heldout_dataset, train_dataset
from .metrics import Score, score_of, sums
from .params import LanguageModelParams, input_shapes_of, layer_flops_of
from .unigram import fit_unigram
from .vocabulary import Vocabulary


class LanguageModelSubject(Subject):
    """A configuration of the language model, on a text; checkpoints note `about`."""

    unit = "tokens"
    read_ahead = PREFETCHED_BATCHES
    rate_name = "--learning_rate"

    def __init__(
        self,
        config: LanguageModelParams,
        corpus: Corpus,
        vocabulary: Vocabulary,
        device_type: str,
        about: About,
    ) -> None:
        self.name = type(config).__name__
        self.plan, self.device_type, self.seed = config.PLAN, device_type, config.SEED
        self.about = about
        self._config, self._corpus, self._vocabulary = config, corpus, vocabulary
        self._sizes = {"batch_size": config.BATCH_SIZE, "sequence_length": config.SEQUENCE_LENGTH}

    def task(self) -> Any:
        """Returns the params of the lingvo task."""
        return self._config.Task()

    def train_data(self, epoch: int) -> tf.data.Dataset:
        """Returns packed rows without end."""
        return train_dataset(
            self._corpus,
            self._vocabulary,
            seed=self._config.SEED,
            first_epoch=epoch,
            **self._sizes,
        )

    def heldout_data(self) -> tf.data.Dataset:
        """Returns packed rows of the held-out text, the last ones padded."""
        return heldout_dataset(self._corpus, self._vocabulary, **self._sizes)

    def sample(self, batches: int) -> Any:
        """Returns sentences drawn evenly from the whole held-out text."""
        return heldout.draw(self._corpus, self._vocabulary, batches=batches, **self._sizes)

    def outcome(self, metrics: Mapping[str, Any], per_example: Mapping[str, Any]) -> Any:
        """Returns the sums of a batch's score, so that no labels are fetched from devices."""
        xent, labels, weights = (per_example[name] for name in ("xent", "labels", "weights"))
        return sums(xent, labels, weights, self._vocabulary)

    def score(self, batch: Any, outcome: Any, loss: str) -> Score:
        """Returns the score in bits per byte, and per token and word."""
        return score_of(outcome)

    def nothing(self) -> Score:
        """Returns the score of no text."""
        return Score()

    def input_shapes(self) -> Sequence[Any]:
        """Returns the shapes of the stack's five inputs."""
        return input_shapes_of(self._config, self.plan.num_replicas)

    @functools.cached_property
    def _flops(self) -> float:
        return 3.0 * sum(layer_flops_of(self._config))

    def flops(self) -> float:
        """Returns flops by the layers' `FPropMeta`; a backward pass has twice those of a forward
        pass.
        """
        return self._flops

    def note(self) -> dict[str, Any]:
        """Returns model, settings, text and vocabulary."""
        return self.about.to_note()

    def epilogue(self, score: Any, batches: Iterable[Any]) -> Iterator[str]:
        """Yields the unigram model's score of the same tokens."""
        with waiting("counting tokens for the unigram model"):
            unigram = fit_unigram(self._corpus.train, self._vocabulary).score(batches)
        yield f"smoothed unigram model, same tokens: {unigram}"
        share = ratio(score.bits_per_byte, unigram.bits_per_byte)
        yield (
            f"bits per byte are {100 * abs(1 - share):.1f}% {'below' if share < 1 else 'above'}"
            " those of the unigram model"
        )
