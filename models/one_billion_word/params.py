"""Named configurations of the language model, registered with lingvo."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf
from lingvo import model_registry
from lingvo.core import base_model_params, learner, optimizer, schedule, tshape

from models.one_billion_word.lingvo_input import OneBillionWordInput
from models.one_billion_word.task import LanguageModel
from models.one_billion_word.transformer import Block, Embedding, Softmax
from pipemesh.layers import PartitionSequentialLayers, PipeliningLayer
from pipemesh.layers.partition_layers import layer_flops, named_layers, stage_params
from pipemesh.partition import Partition


class LanguageModelParams(base_model_params.SingleTaskModelParams):
    """A decoder-only Transformer over packed sentences.

    Attributes may be changed on an instance before its methods are called.
    """

    VOCAB_SIZE: int
    MODEL_DIM: int
    HIDDEN_DIM: int
    NUM_LAYERS: int
    NUM_HEADS: int
    SEQUENCE_LENGTH: int
    BATCH_SIZE: int
    NUM_STAGES = 2
    # How many of the blocks each stage has; None lets the partitioner cut by flops.
    BLOCKS_PER_STAGE: tuple[int, ...] | None = None
    NUM_MICRO_BATCHES = 8
    DROPOUT_PROB = 0.1
    LEARNING_RATE = 1.0
    WARMUP_STEPS = 4000
    CLIP_GRADIENT_NORM = 0.0
    SCHEDULE = "1f1b"
    REMAT = "full"
    COMPUTE_DTYPE: str | None = None
    STRICT_DEVICES = False
    DATA_DIR: str | None = None
    TRAIN_PATTERN: str | None = None
    HELDOUT_PATTERN: str | None = None
    CACHE_DIR: str | None = None
    SEED = 0

    def Train(self) -> Any:
        return self._input("Train", heldout=False)

    def Dev(self) -> Any:
        return self._input("Dev", heldout=True)

    def Test(self) -> Any:
        return self._input("Test", heldout=True)

    def Heldout(self) -> Any:
        return self._input("Heldout", heldout=True)

    def _input(self, name: str, heldout: bool) -> Any:
        return OneBillionWordInput.Params().Set(
            name=name,
            data_dir=self.DATA_DIR,
            train_pattern=self.TRAIN_PATTERN,
            heldout_pattern=self.HELDOUT_PATTERN,
            cache_dir=self.CACHE_DIR,
            vocab_size=self.VOCAB_SIZE,
            sequence_length=self.SEQUENCE_LENGTH,
            batch_size=self.BATCH_SIZE,
            heldout=heldout,
            seed=self.SEED,
        )

    def Task(self) -> Any:
        p = LanguageModel.Params().Set(name="language_model")
        p.stack = PipeliningLayer.Params().Set(
            cell_tpl=stages_of(self),
            num_micro_batches=self.NUM_MICRO_BATCHES,
            schedule=self.SCHEDULE,
            loss_inside=True,
            remat=self.REMAT,
            fprop_dtype=self.COMPUTE_DTYPE and tf.as_dtype(self.COMPUTE_DTYPE),
            strict_devices=self.STRICT_DEVICES,
        )
        p.train.learner = learner.Learner.Params().Set(
            name="loss",
            optimizer=optimizer.Adam.ParamsB(),
            learning_rate=self.LEARNING_RATE,
            lr_schedule=schedule.TransformerSchedule.Params().Set(
                warmup_steps=self.WARMUP_STEPS, model_dim=self.MODEL_DIM
            ),
            clip_gradient_norm_to_value=self.CLIP_GRADIENT_NORM,
        )
        p.eval.samples_per_summary = 0
        p.random_seed = self.SEED
        return p


# Functions of a configuration: its public methods would be data sets of lingvo.


def layers_of(config: LanguageModelParams) -> list[Any]:
    """Params of all layers of the stack, first to last."""
    block = Block.Params().Set(
        model_dim=config.MODEL_DIM,
        hidden_dim=config.HIDDEN_DIM,
        num_heads=config.NUM_HEADS,
        dropout_prob=config.DROPOUT_PROB,
    )
    embedding = Embedding.Params().Set(
        vocab_size=config.VOCAB_SIZE, model_dim=config.MODEL_DIM, dropout_prob=config.DROPOUT_PROB
    )
    softmax = Softmax.Params().Set(vocab_size=config.VOCAB_SIZE, model_dim=config.MODEL_DIM)
    return [embedding, *(block.Copy() for _ in range(config.NUM_LAYERS)), softmax]


def input_shapes_of(config: LanguageModelParams) -> tuple[Any, ...]:
    """Shapes of the five inputs of the stack, for one microbatch."""
    size = config.BATCH_SIZE // config.NUM_MICRO_BATCHES
    return (tshape.Shape([size, config.SEQUENCE_LENGTH]),) * 5


def stages_of(config: LanguageModelParams) -> list[Any]:
    """Params of the stages."""
    shapes = input_shapes_of(config)
    if config.BLOCKS_PER_STAGE is None:
        return PartitionSequentialLayers(layers_of(config), config.NUM_STAGES, *shapes)
    layers = named_layers(layers_of(config))
    # The embedding goes with the first blocks, the softmax with the last ones.
    ends = [1 + end for end in itertools.accumulate(config.BLOCKS_PER_STAGE)]
    boundaries = (0, *ends[:-1], len(layers))
    flops = layer_flops(layers, *shapes)
    costs = tuple(sum(flops[a:b]) for a, b in itertools.pairwise(boundaries))
    return stage_params(layers, Partition(boundaries, costs))


@model_registry.RegisterSingleTaskModel
class OneBillionWordTiny(LanguageModelParams):
    """Trains on a laptop's CPU in minutes, on the embedded text."""

    VOCAB_SIZE = 2048
    MODEL_DIM = 192
    HIDDEN_DIM = 768
    NUM_LAYERS = 5
    NUM_HEADS = 4
    SEQUENCE_LENGTH = 128
    BATCH_SIZE = 16
    WARMUP_STEPS = 100
    LEARNING_RATE = 0.4
    CLIP_GRADIENT_NORM = 1.0


@model_registry.RegisterSingleTaskModel
class OneBillionWordBase(LanguageModelParams):
    """The size of the base Transformer, for one machine with a few GPUs."""

    VOCAB_SIZE = 32_000
    MODEL_DIM = 512
    HIDDEN_DIM = 2048
    NUM_LAYERS = 6
    NUM_HEADS = 8
    SEQUENCE_LENGTH = 256
    BATCH_SIZE = 64
    WARMUP_STEPS = 4000
    CLIP_GRADIENT_NORM = 1.0


@model_registry.RegisterSingleTaskModel
class OneBillionWordGPipe32(LanguageModelParams):
    """32 layers in 4 stages of 8, trained with 32 microbatches."""

    VOCAB_SIZE = 32_000
    MODEL_DIM = 2048
    HIDDEN_DIM = 8192
    NUM_LAYERS = 32
    NUM_HEADS = 16
    SEQUENCE_LENGTH = 1024
    BATCH_SIZE = 32
    NUM_STAGES = 4
    SCHEDULE = "gpipe"
    BLOCKS_PER_STAGE = (8, 8, 8, 8)
    NUM_MICRO_BATCHES = 32
    WARMUP_STEPS = 40_000


CONFIGURATIONS = {
    configuration.__name__: configuration
    for configuration in (OneBillionWordTiny, OneBillionWordBase, OneBillionWordGPipe32)
}
