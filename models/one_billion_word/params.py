"""Named configurations of the language model, registered with lingvo."""

from __future__ import annotations

import itertools
from typing import Any

from lingvo import model_registry
from lingvo.core import base_model_params, learner, schedule, tshape

from pipemesh.layers import PartitionSequentialLayers, PipeliningLayer
from pipemesh.layers.partition_layers import layer_flops, named_layers, stage_params
from pipemesh.partition import Partition
from pipemesh.training.learning import Learning

from . import sizes
from .lingvo_input import OneBillionWordInput
from .named_transformer import named_layers_of, tied_weights_of
from .simd_plan import alike_boundaries
from .task import LanguageModel
from .transformer import Block, Embedding, Softmax


class LanguageModelParams(sizes.Settings, base_model_params.SingleTaskModelParams):
    """A decoder-only Transformer over packed sentences.

    Attributes may be changed on an instance before its methods are called.
    """

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
        p.stack = stack_of(self, stages_of(self), tied_weights_of(self))
        rates = schedule.TransformerSchedule.Params().Set(model_dim=self.MODEL_DIM)
        p.train.learner = learner_of(self, rates)
        p.train.ema_decay = self.EMA_DECAY
        p.eval.samples_per_summary = 0
        p.random_seed = self.SEED
        return p


# These are functions, because lingvo takes public methods of a configuration for datasets.


def stack_of(config: Any, stages: list[Any], tied_weights: dict[str, str]) -> Any:
    """Returns the params of a language model's pipelined stack under its plan."""
    return PipeliningLayer.ForPlan(
        config.PLAN,
        cell_tpl=stages,
        tied_weights=tied_weights,
        loss_inside=True,
        strict_devices=config.STRICT_DEVICES,
        compile=config.COMPILE,
        pipelined=config.PIPELINED,
    )


def learner_of(config: Any, rates: Any) -> Any:
    """Returns the params of a learner as a configuration says, by default with these rates."""
    made = learner.Learner.Params().Set(
        name="loss",
        lr_schedule=rates,
        bprop_variable_filter=config.TRAIN_ONLY,
        bprop_variable_exclusion=config.FREEZE,
    )
    Learning.of(config).change(made)
    return made


def layers_of(config: LanguageModelParams) -> list[Any]:
    """Returns the params of all layers of the stack, first to last."""
    if config.LAYERS == "named":
        return named_layers_of(config)
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


def input_shapes_of(config: Any, num_replicas: int = 1, number: int = 5) -> tuple[Any, ...]:
    """Returns the shapes of the stack's inputs, for one replica's part of a microbatch.

    Inputs before the last five are a source's; a target may have another length.
    """
    size = config.BATCH_SIZE // config.PLAN.num_microbatches // num_replicas
    source = config.SEQUENCE_LENGTH
    lengths = [source] * (number - 5) + [getattr(config, "TARGET_LENGTH", source)] * 5
    return tuple(tshape.Shape([size, length]) for length in lengths)


def stages_of(config: LanguageModelParams) -> list[Any]:
    """Returns the params of the stages."""
    return cut(config, layers_of(config))


def cut(config: Any, layers: list[Any], num_inputs: int = 5) -> list[Any]:
    """Returns the params of the stages, cut by the plan's boundaries or by the flops of the
    layers.
    """
    shapes = input_shapes_of(config, number=num_inputs)
    boundaries = config.PLAN.boundaries
    if boundaries is None and config.PLAN.lowering == "simd":
        boundaries = alike_boundaries(config)
    if boundaries is None:
        plan, speeds = config.PLAN, None
        if not plan.mesh.is_even:
            # A home with more devices gets more layers.
            speeds = [len(plan.home(stage)) for stage in range(plan.num_stages)]
        return PartitionSequentialLayers(layers, plan.num_stages, *shapes, speeds=speeds)
    layers = named_layers(layers)
    flops = layer_flops(layers, *shapes)
    costs = tuple(sum(flops[a:b]) for a, b in itertools.pairwise(boundaries))
    return stage_params(layers, Partition(boundaries, costs))


def layer_flops_of(config: LanguageModelParams) -> list[float]:
    """Returns the flops of the forward pass of each layer, for the whole batch."""
    shape = tshape.Shape([config.BATCH_SIZE, config.SEQUENCE_LENGTH])
    return list(layer_flops(named_layers(layers_of(config)), *(shape,) * 5))


def boundaries_of(config: LanguageModelParams) -> tuple[int, ...]:
    """Returns the layer indices at which the stages start, and the number of layers."""
    return tuple(itertools.accumulate((len(cell.sub) for cell in stages_of(config)), initial=0))


@model_registry.RegisterSingleTaskModel
class OneBillionWordTiny(sizes.Tiny, LanguageModelParams):
    """Trains on a laptop's CPU in minutes, on the embedded text."""


@model_registry.RegisterSingleTaskModel
class OneBillionWordTinyTied(sizes.TinyTied, LanguageModelParams):
    """OneBillionWordTiny with one table for the embedding and the softmax."""


@model_registry.RegisterSingleTaskModel
class OneBillionWordTinyExperts(sizes.TinyExperts, LanguageModelParams):
    """OneBillionWordTiny with four experts in each block, two for each token."""


@model_registry.RegisterSingleTaskModel
class OneBillionWordBase(sizes.Base, LanguageModelParams):
    """The size of the base Transformer, for one machine with a few GPUs."""


@model_registry.RegisterSingleTaskModel
class OneBillionWordGPipe32(sizes.GPipe32, LanguageModelParams):
    """32 layers in 4 stages of 8, trained with 32 microbatches."""


# lingvo's registration returns another type than the class.
CONFIGURATIONS: dict[str, type[LanguageModelParams]] = {  # pyright: ignore[reportAssignmentType]
    configuration.__name__: configuration
    for configuration in (
        OneBillionWordTiny,
        OneBillionWordTinyTied,
        OneBillionWordTinyExperts,
        OneBillionWordBase,
        OneBillionWordGPipe32,
    )
}
