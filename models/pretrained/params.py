"""Families of models registered with lingvo; files define their sizes."""

from __future__ import annotations

from typing import Any

from lingvo import model_registry
from lingvo.core import base_model_params, schedule

from pipemesh.data import MaskedTokens, SpanCorruption
from pipemesh.errors import DataError, PlanError, TrainingError
from pipemesh.layers import DatasetInput, named
from pipemesh.layers.named.lora import ADAPTERS, LowRank, adapt
from pipemesh.mesh import Mesh
from pipemesh.plan import Plan
from pipemesh.plan.plan import check_batch
from pipemesh.training.registered import ADAPTER_SETTINGS

from ..one_billion_word.named_transformer import (
    ExpertsBlock,
    ExpertsEmbedding,
    NamedBlock,
    NamedEmbedding,
    NamedSoftmax,
)
from ..one_billion_word.params import cut, learner_of, stack_of
from ..one_billion_word.task import LanguageModel
from ..translation.task import Translation
from . import config as configs
from . import names
from .families import Config
from .masked import MaskedLanguageModel, MaskedSoftmax, TypedEmbedding
from .text import batches_of
from .values import WeightsError

# By the kind of the model: its task, and the classes of embedding, block and head.
_TASKS = {
    "decoder": LanguageModel,
    "encoder": MaskedLanguageModel,
    "encoder_decoder": Translation,
}
_LAYERS = {
    "decoder": (NamedEmbedding, NamedBlock, NamedSoftmax),
    "encoder": (TypedEmbedding, NamedBlock, MaskedSoftmax),
    "encoder_decoder": (named.Embedding, named.TransformerBlock, named.SoftmaxCrossEntropy),
}


class PretrainedParams(base_model_params.SingleTaskModelParams):
    """A pretrained language model, and its settings for further training.

    For other settings, derive a class with them, and pass it to `pipemesh checkpoint import
    --model`. Attributes may also be changed on an instance before its methods run.
    """

    # The model type that its file must have.
    MODEL_TYPE = ""
    # The folder with config.json and the tokenizer: the log directory.
    LOGDIR: str = "."
    # The sizes, if there is no file.
    CONFIG: Config | None = None
    # The module for decoding.
    DECODED_BY = f"{__package__}.decode"
    PLAN = Plan(Mesh.from_text("layers:2"), num_microbatches=4)
    PIPELINED = True
    STRICT_DEVICES = False
    COMPILE = False
    BATCH_SIZE = 8
    # Tokens in a row for training, limited by the model.
    SEQUENCE_LENGTH = 512
    # Sources of documents, as `pipemesh.data.parse_sources` reads them.
    TRAIN_DATA: str | None = None
    HELDOUT_DATA: str | None = None
    # How documents share rows, one of `pipemesh.data.PACKINGS`.
    PACKING = "auto"
    # Shorter lengths that the rows of a batch may have, such as "128,256".
    BUCKETS = ""
    # Share of tokens that an encoder's data masks, or that spans replace in an encoder-decoder's;
    # of the latter 0 for documents that are pairs of a prompt and its completion.
    CORRUPTION_RATE = 0.15
    # Mean length of these spans.
    MEAN_SPAN = 3.0
    # As `pipemesh.training.learning.Learning`, whose other values may be set as well.
    OPTIMIZER = "adam"
    LEARNING_RATE = 1e-5
    CLIP_GRADIENT_NORM = 1.0
    # Dropout rate of what is added to the residuals, and after the embedding; None for the file's
    # rates.
    DROPOUT_PROB: float | None = None
    # Regular expressions of weights: those that are not trained, and the only ones that are.
    FREEZE: str | None = None
    TRAIN_ONLY: str | None = None
    # The rank of adapters (Hu et al., "LoRA", 2021), the only weights that are trained then; 0 for
    # none. Their product is multiplied by alpha / rank.
    LORA_RANK = 0
    LORA_ALPHA = 16.0
    LORA_DROPOUT = 0.0
    # A regular expression of the adapted weights, such as `cell_003/attention/w_q`.
    LORA_TARGETS = "attention/w_[qv]"
    # Number that the tokens of each device are a multiple of, by padding.
    VOCAB_MULTIPLE = 1
    SEED = 0

    def GetAllDatasetParams(self) -> dict[str, Any]:
        """Returns the params of the training data, and of the held-out data if there is any."""
        found = {"Train": self.Train()}
        if self.HELDOUT_DATA is not None:
            found["Dev"] = found["Test"] = self._input("Dev", self.HELDOUT_DATA)
        return found

    def Train(self) -> Any:
        """Returns the params of endless training batches."""
        if self.TRAIN_DATA is None:
            return DatasetInput.Params().Set(name="Train", dataset=_no_data)
        return self._input("Train", self.TRAIN_DATA, self.SEED)

    def _input(self, name: str, data: str, seed: int | None = None) -> Any:
        length, corruption = length_of(self), corruption_of(self)
        others: dict[str, Any] = {
            "corruption": corruption,
            "buckets": "" if seed is None else self.BUCKETS,
        }
        if config_of(self).kind == "encoder_decoder" and corruption is None:
            others["source_length"] = length
        batches = batches_of(
            data, self.LOGDIR, length, self.BATCH_SIZE, self.PACKING, seed, **others
        )
        return DatasetInput.Params().Set(name=name, dataset=batches, batch_size=self.BATCH_SIZE)

    def Task(self) -> Any:
        """Returns the params of the task."""
        config = config_of(self)
        p = _TASKS[config.kind].Params().Set(name=names.TASK)
        if self.LORA_RANK and (self.FREEZE or self.TRAIN_ONLY):
            raise TrainingError(
                f"LORA_RANK={self.LORA_RANK} trains adapters alone, but FREEZE is {self.FREEZE!r} "
                f"and TRAIN_ONLY {self.TRAIN_ONLY!r}; leave these out (--freeze= --train_only=), "
                "and choose adapters by LORA_TARGETS (--lora_targets)"
            )
        given = [name for name in ADAPTER_SETTINGS[1:] if name in vars(self)]
        if given and not self.LORA_RANK:
            flags = ", ".join(f"--{name.lower()}={getattr(self, name)}" for name in given)
            raise TrainingError(
                f"{flags}: there are no adapters, since LORA_RANK is 0; give --lora_rank, or leave "
                "out the others to train all weights"
            )
        p.stack = stack_of(self, stages_of(self), names.tied_of(config))
        p.train.learner = learner_of(self, schedule.Constant.Params())
        if self.LORA_RANK:
            p.train.learner.bprop_variable_filter = ADAPTERS
        p.eval.samples_per_summary = 0
        p.random_seed = self.SEED
        return p


# These are functions, because lingvo takes public methods of a configuration for datasets.


def config_of(params: PretrainedParams) -> Config:
    """Returns the sizes of the model; raises WeightsError if they are missing or another
    class's.
    """
    found = params.CONFIG
    if found is None:
        found = configs.of_folder(params.LOGDIR)
    if found.model_type != params.MODEL_TYPE:
        raise WeightsError(
            f"{type(params).__name__} has model_type {params.MODEL_TYPE!r}, but {configs.FILE} is "
            f"of {found.model_type!r}; take {MODELS[found.model_type]}"
        )
    return found


def length_of(params: PretrainedParams) -> int:
    """Returns the number of tokens in a row for training."""
    return min(params.SEQUENCE_LENGTH, config_of(params).max_length)


def corruption_of(params: PretrainedParams) -> MaskedTokens | SpanCorruption | None:
    """Returns the corruption of the model's data; None if it learns what follows or completes."""
    config, rate = config_of(params), params.CORRUPTION_RATE
    if config.kind == "encoder":
        return MaskedTokens(rate)
    if config.kind == "encoder_decoder" and rate:
        return SpanCorruption(rate, params.MEAN_SPAN, config.start)
    return None


def stages_of(params: PretrainedParams) -> list[Any]:
    """Returns the params of the stages; raises PlanError if the batch does not divide."""
    number = params.PLAN.num_microbatches
    try:
        check_batch(params.BATCH_SIZE, number)
    except PlanError as error:
        raise PlanError(
            f"num_microbatches={number}: {error}; or give another --batch_size"
        ) from error

    config = config_of(params)

    class Sizes:
        PLAN, BATCH_SIZE = params.PLAN, params.BATCH_SIZE
        SEQUENCE_LENGTH, NUM_LAYERS = length_of(params), config.num_layers
        TARGET_LENGTH = SEQUENCE_LENGTH

    if isinstance(corruption := corruption_of(params), SpanCorruption):
        # That of a row of one text.
        Sizes.TARGET_LENGTH = sum(corruption.sizes(Sizes.SEQUENCE_LENGTH)) + 1
    layers = layers_of(config, params.DROPOUT_PROB)
    for layer in layers:
        if "vocab_multiple" in layer:
            layer.vocab_multiple = params.VOCAB_MULTIPLE
    if params.LORA_RANK:
        adapter = LowRank.Params().Set(
            rank=params.LORA_RANK, alpha=params.LORA_ALPHA, dropout_rate=params.LORA_DROPOUT
        )
        adapt(layers, adapter, params.LORA_TARGETS)
    return cut(Sizes, layers, len(_TASKS[config.kind].INPUTS))


def layers_of(config: Config, dropout: float | None = None) -> list[Any]:
    """Returns the params of the embedding, the blocks and the head; `dropout` replaces the file's
    rates.
    """
    is_rotary, has_experts = config.rotary_base is not None, bool(config.num_experts)
    is_masked = config.kind == "encoder"
    first, middle, last = _LAYERS[config.kind]
    norm = named.Norm.Params().Set(
        kind=config.norm, epsilon=config.epsilon, direct_scale=not config.norms_above_one
    )
    attention = named.Attention.Params().Set(
        num_kv_heads=config.num_kv_heads,
        dim_per_head=config.head_dim,
        use_bias=config.attention_bias,
        use_out_bias=config.out_bias,
        norm_tpl=norm if config.head_norms else None,
        score_scale=config.score_scale,
        score_cap=config.score_cap,
        causal=not is_masked,
        relative_buckets=config.relative_buckets,
        relative_max_distance=config.relative_max_distance,
        use_rotary=is_rotary,
        rotary_dim=config.rotary_dim,
    )
    if is_rotary:
        attention.rotary_base = config.rotary_base
    if config.rotary_scaling is not None:
        attention.rotary_scaling = named.RotaryScaling(**config.rotary_scaling)
    block = (ExpertsBlock if has_experts else middle).Params()
    block.Set(
        input_dim=config.model_dim,
        num_heads=config.num_heads,
        hidden_dim=config.hidden_dim,
        dropout_rate=config.residual_dropout if dropout is None else dropout,
        parallel=config.parallel,
        output_norms=config.output_norms,
        post_norm=is_masked,
        norm_tpl=norm,
        attention_tpl=attention,
    )
    if has_experts:
        block.feed_forward_tpl = named.Experts.Params().Set(
            num_experts=config.num_experts, capacity_factor=None, activation=config.activation
        )
    else:
        block.feed_forward_tpl.Set(activation=config.activation, use_bias=config.feed_forward_bias)
    embedding = (ExpertsEmbedding if has_experts else first).Params()
    embedding.Set(
        vocab_size=config.vocab_size,
        embedding_dim=config.model_dim,
        scale_sqrt_depth=config.scaled_embedding,
        positions="none" if is_rotary or config.relative_buckets else "learned",
        max_length=config.max_length,
        unused_positions=config.unused_positions,
        dropout_rate=config.embedding_dropout if dropout is None else dropout,
    )
    head = last.Params().Set(
        vocab_size=config.vocab_size,
        input_dim=config.model_dim,
        use_bias=is_masked,
        logit_scale=config.logit_scale,
        logit_cap=config.logit_cap,
        norm_tpl=norm,
    )
    if is_masked:
        embedding.Set(num_types=config.token_types, sum_norm_tpl=norm)
        head.activation = config.activation
    if config.num_decoder_layers:
        block.feed_forward_tpl.dropout_rate = block.dropout_rate
        numbers = config.num_layers, config.num_decoder_layers
        return named.encoder_decoder_layers(embedding, block, head, *numbers, tied=False)[0]
    blocks = [block.Copy() for _ in range(config.num_layers)]
    for each, window in zip(blocks, config.windows, strict=False):
        each.attention_tpl.window = window
    return [embedding, *blocks, head]


def _no_data() -> Any:
    raise DataError(
        "there is no data to train on; give --train_data=FILE, or derive a class from that of the "
        "model, with the attribute TRAIN_DATA"
    )


@model_registry.RegisterSingleTaskModel
class Bert(PretrainedParams):
    """The model of Devlin et al., 2019, which predicts masked tokens."""

    MODEL_TYPE = "bert"
    # It does not go on with texts.
    DECODED_BY = None


@model_registry.RegisterSingleTaskModel
class Gemma(PretrainedParams):
    """The model of Gemma Team, 2024."""

    MODEL_TYPE = "gemma"


@model_registry.RegisterSingleTaskModel
class Gemma2(PretrainedParams):
    """The model of Gemma Team, 2024: the second generation."""

    MODEL_TYPE = "gemma2"


@model_registry.RegisterSingleTaskModel
class Gpt2(PretrainedParams):
    """The model of Radford et al., 2019."""

    MODEL_TYPE = "gpt2"


@model_registry.RegisterSingleTaskModel
class GptNeoX(PretrainedParams):
    """The model of Black et al., 2022, and Biderman et al., 2023."""

    MODEL_TYPE = "gpt_neox"


@model_registry.RegisterSingleTaskModel
class Llama(PretrainedParams):
    """The model of Touvron et al., 2023."""

    MODEL_TYPE = "llama"


@model_registry.RegisterSingleTaskModel
class Mistral(PretrainedParams):
    """The model of Jiang et al., 2023."""

    MODEL_TYPE = "mistral"


@model_registry.RegisterSingleTaskModel
class Mixtral(PretrainedParams):
    """The model of Jiang et al., 2024."""

    MODEL_TYPE = "mixtral"


@model_registry.RegisterSingleTaskModel
class Opt(PretrainedParams):
    """The model of Zhang et al., 2022."""

    MODEL_TYPE = "opt"


@model_registry.RegisterSingleTaskModel
class Phi3(PretrainedParams):
    """The model of Abdin et al., 2024."""

    MODEL_TYPE = "phi3"


@model_registry.RegisterSingleTaskModel
class Qwen2(PretrainedParams):
    """The model of Yang et al., 2024."""

    MODEL_TYPE = "qwen2"


@model_registry.RegisterSingleTaskModel
class Qwen3(PretrainedParams):
    """The model of Yang et al., 2025."""

    MODEL_TYPE = "qwen3"


@model_registry.RegisterSingleTaskModel
class T5(PretrainedParams):
    """The model of Raffel et al., 2020, an encoder-decoder."""

    MODEL_TYPE = "t5"


# The name of the class, by the type in a file.
MODELS = {
    family.MODEL_TYPE: f"{__name__}.{family.__name__}"
    for family in PretrainedParams.__subclasses__()
}
