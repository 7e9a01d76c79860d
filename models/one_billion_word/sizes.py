"""The settings of the named configurations: plain numbers and names, known without TensorFlow."""

from __future__ import annotations

from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan import Plan
from pipemesh.plan.homes import cut_rules


class Settings:
    """The settings of a language model and its run, which may be changed on an instance
    before use.
    """

    VOCAB_SIZE: int
    MODEL_DIM: int
    HIDDEN_DIM: int
    NUM_LAYERS: int
    NUM_HEADS: int
    SEQUENCE_LENGTH: int
    BATCH_SIZE: int
    # Layers with named dims, which the plan's layout may split, or lingvo's layers.
    LAYERS: str = "named"
    # Only for layers with named dims: the last layer shares the embedding's table, and the
    # feed-forward layers are mixtures of experts.
    TIED_EMBEDDINGS = False
    NUM_EXPERTS = 0
    EXPERT_CHOICES = 2
    CAPACITY_FACTOR: float | None = 1.25
    BALANCE_WEIGHT = 0.01
    # The plan; it cuts the embedding, the blocks and the softmax into stages.
    PLAN = Plan(Mesh.from_text("layers:2"), num_microbatches=8)
    DROPOUT_PROB = 0.1
    # As `pipemesh.training.learning.Learning`. Without a schedule it is the Transformer's, for
    # which the learning rate is a factor.
    OPTIMIZER = "adam"
    LEARNING_RATE = 1.0
    LEARNING_RATE_SCHEDULE: str | None = None
    WARMUP_STEPS = 4000
    DECAY_STEPS: int | None = None
    STABLE_STEPS: int | None = None
    FINAL_LEARNING_RATE: float | None = None
    WEIGHT_DECAY: float | None = None
    WEIGHT_DECAY_EXCEPT: str | None = None
    CLIP_GRADIENT_NORM = 0.0
    # Decay of the moving averages of weights, which evaluation uses; 0 for none.
    EMA_DECAY = 0.0
    # Without a pipeline, the stages process the whole batch in sequence.
    PIPELINED: bool = True
    # Values of the plan that the trainer chooses if no flag sets them.
    CHOSEN: tuple[str, ...] = ("num_microbatches", "remat")
    STRICT_DEVICES = False
    COMPILE = False
    # Regular expressions of weights: those that are not trained, and the only ones that are.
    FREEZE: str | None = None
    TRAIN_ONLY: str | None = None
    DATA_DIR: str | None = None
    TRAIN_PATTERN: str | None = None
    HELDOUT_PATTERN: str | None = None
    CACHE_DIR: str | None = None
    SEED = 0


class Tiny(Settings):
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


class TinyTied(Tiny):
    """The sizes of Tiny, with one table for the embedding and the softmax."""

    TIED_EMBEDDINGS = True


class TinyExperts(Tiny):
    """The sizes of Tiny, with four experts in each block, two for each token."""

    NUM_EXPERTS = 4


class Base(Settings):
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


class GPipe32(Settings):
    """32 layers in 4 stages of 8, trained with 32 microbatches."""

    VOCAB_SIZE = 32_000
    MODEL_DIM = 2048
    HIDDEN_DIM = 8192
    NUM_LAYERS = 32
    NUM_HEADS = 16
    SEQUENCE_LENGTH = 1024
    BATCH_SIZE = 32
    # The embedding is with the first eight blocks, the softmax with the last ones.
    PLAN = Plan(
        Mesh.from_text("layers:4"),
        schedule="gpipe",
        num_microbatches=32,
        boundaries=(0, 9, 17, 25, 34),
    )
    CHOSEN = ()
    WARMUP_STEPS = 40_000


# Kinds of layers of a model.
LAYERS = ("named", "lingvo")


def dims_of(settings: Settings, layout: LayoutRules) -> tuple[str, ...]:
    """Returns the dims that a layout may split: for lingvo layers only the batch.

    Nearly all weights have `embed`. It may share the axis of the batch, which splits only weights.
    """
    if settings.LAYERS == "lingvo":
        return ("batch",)
    hidden = ("experts", "expert_ff") if settings.NUM_EXPERTS else ("d_ff",)
    cut = [dim for dim, _ in cut_rules(layout).rules if dim == "embed"]
    return ("batch", "length", "heads", *hidden, "vocab", *cut)


# By the name of the configuration in lingvo.
SIZES: dict[str, type[Settings]] = {
    "OneBillionWordTiny": Tiny,
    "OneBillionWordTinyTied": TinyTied,
    "OneBillionWordTinyExperts": TinyExperts,
    "OneBillionWordBase": Base,
    "OneBillionWordGPipe32": GPipe32,
}
