"""Named configurations of translators, registered with lingvo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lingvo import model_registry
from lingvo.core import base_model_params, schedule

from pipemesh.data import DocumentBatches
from pipemesh.layers import DatasetInput, named
from pipemesh.mesh import Mesh
from pipemesh.plan import Plan

from ..one_billion_word.params import cut, learner_of, stack_of
from .catalogues import HELDOUT, TRAIN, EmbeddedPairs
from .spelling import LearnedSpelling
from .task import Translation


class TranslationParams(base_model_params.SingleTaskModelParams):
    """An encoder-decoder over packed pairs of sentences.

    Attributes may be changed on an instance before its methods are called.
    """

    VOCAB_SIZE: int
    MODEL_DIM: int
    HIDDEN_DIM: int
    NUM_HEADS: int
    # Blocks of the encoder, and as many of the decoder.
    NUM_LAYERS: int
    # Tokens in a row of sources, and in one of targets.
    SEQUENCE_LENGTH: int
    BATCH_SIZE: int
    NUM_STEPS: int
    # The folder with the pieces of the vocabulary, and the embedded pairs: the log directory.
    LOGDIR: str = "."
    # Pairs of prompts and completions, as `pipemesh.data.parse_sources` reads them; None for the
    # embedded ones of LANGUAGES.
    TRAIN_DATA: str | None = None
    HELDOUT_DATA: str | None = None
    LANGUAGES = ("fr", "es")
    # How pairs share rows, `whole` or `single`.
    PACKING = "auto"
    # Shorter lengths that the rows of a batch may have, such as "128,256".
    BUCKETS = ""
    DECODED_BY = f"{__package__}.decode"
    PLAN = Plan(Mesh.from_text("layers:2"), num_microbatches=4)
    PIPELINED = True
    STRICT_DEVICES = False
    COMPILE = False
    DROPOUT_PROB = 0.1
    # As `pipemesh.training.learning.Learning`, whose other values may be set as well.
    OPTIMIZER = "adam"
    LEARNING_RATE = 1.5e-3
    LEARNING_RATE_SCHEDULE = "linear"
    WARMUP_STEPS: int | None = None
    CLIP_GRADIENT_NORM = 1.0
    # Regular expressions of weights: those that are not trained, and the only ones that are.
    FREEZE: str | None = None
    TRAIN_ONLY: str | None = None
    # Number that the tokens of each device are a multiple of, by padding.
    VOCAB_MULTIPLE = 1
    SEED = 0

    def GetAllDatasetParams(self) -> dict[str, Any]:
        """Returns the params of the training data, and of the held-out data if there is any."""
        found = {"Train": self.Train()}
        if (heldout := heldout_of(self)) is not None:
            found["Dev"] = found["Test"] = self._input("Dev", heldout)
        return found

    def Train(self) -> Any:
        """Returns the params of endless training batches."""
        return self._input("Train", _train_of(self), self.SEED)

    def _input(self, name: str, sources: str | Callable[[], str], seed: int | None = None) -> Any:
        length = self.SEQUENCE_LENGTH
        batches = DocumentBatches(
            sources,
            LearnedSpelling(self.LOGDIR, self.VOCAB_SIZE, _train_of(self)),
            length,
            self.BATCH_SIZE,
            self.PACKING,
            seed,
            source_length=length,
            buckets="" if seed is None else self.BUCKETS,
        )
        return DatasetInput.Params().Set(name=name, dataset=batches, batch_size=self.BATCH_SIZE)

    def Task(self) -> Any:
        """Returns the params of the task."""
        p = Translation.Params().Set(name="translation")
        layers, tied = layers_of(self)
        p.stack = stack_of(self, cut(self, layers, len(Translation.INPUTS)), tied)
        p.train.learner = learner_of(self, schedule.Constant.Params())
        p.train.max_steps = self.NUM_STEPS
        p.eval.samples_per_summary = 0
        p.random_seed = self.SEED
        return p


# These are functions, because lingvo takes public methods of a configuration for datasets.


def _train_of(config: TranslationParams) -> str | EmbeddedPairs:
    return config.TRAIN_DATA or EmbeddedPairs(config.LOGDIR, TRAIN, config.LANGUAGES)


def heldout_of(config: TranslationParams) -> str | EmbeddedPairs | None:
    """Returns the held-out pairs of a configuration; None for training data without any."""
    if config.HELDOUT_DATA or config.TRAIN_DATA:
        return config.HELDOUT_DATA
    return EmbeddedPairs(config.LOGDIR, HELDOUT, config.LANGUAGES)


def layers_of(config: TranslationParams) -> tuple[list[Any], dict[str, str]]:
    """Returns the params of all layers, and the weights that are one table."""
    vocab = {"vocab_size": config.VOCAB_SIZE, "vocab_multiple": config.VOCAB_MULTIPLE}
    return named.encoder_decoder_layers(
        named.Embedding.Params().Set(
            positions="sinusoidal",
            scale_sqrt_depth=True,
            dropout_rate=config.DROPOUT_PROB,
            **vocab,
        ),
        named.TransformerBlock.Params().Set(
            input_dim=config.MODEL_DIM,
            num_heads=config.NUM_HEADS,
            hidden_dim=config.HIDDEN_DIM,
            dropout_rate=config.DROPOUT_PROB,
        ),
        named.SoftmaxCrossEntropy.Params().Set(use_bias=False, **vocab),
        config.NUM_LAYERS,
        config.NUM_LAYERS,
    )


@model_registry.RegisterSingleTaskModel
class TranslationTiny(TranslationParams):
    """Trains on a laptop's CPU in minutes, on the embedded pairs."""

    VOCAB_SIZE = 1500
    MODEL_DIM, HIDDEN_DIM, NUM_HEADS, NUM_LAYERS = 128, 512, 4, 2
    SEQUENCE_LENGTH, BATCH_SIZE, NUM_STEPS = 64, 16, 600
    PLAN = Plan(Mesh.from_text("layers:2"), num_microbatches=2)


@model_registry.RegisterSingleTaskModel
class TranslationBase(TranslationParams):
    """The base model of Vaswani et al., 2017, for one machine with a few GPUs."""

    VOCAB_SIZE = 32000
    MODEL_DIM, HIDDEN_DIM, NUM_HEADS, NUM_LAYERS = 512, 2048, 8, 6
    SEQUENCE_LENGTH, BATCH_SIZE, NUM_STEPS = 256, 128, 100_000
    PLAN = Plan(Mesh.from_text("layers:4"), num_microbatches=16)
    LEARNING_RATE, LEARNING_RATE_SCHEDULE, WARMUP_STEPS = 7e-4, "inverse_sqrt", 4000
