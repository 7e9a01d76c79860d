"""A small translator, and pairs that it can learn."""

import numpy as np
from lingvo import model_registry

from models.translation import params

WORDS = "the a of to in and is it file page open name".split()


@model_registry.RegisterSingleTaskModel
class Small(params.TranslationParams):
    """With dropout; without Adam, which would enlarge round-off where a gradient is zero."""

    VOCAB_SIZE = 290
    MODEL_DIM, HIDDEN_DIM, NUM_HEADS, NUM_LAYERS = 16, 32, 2, 1
    SEQUENCE_LENGTH, BATCH_SIZE, NUM_STEPS, WARMUP_STEPS = 32, 4, 6, None
    OPTIMIZER, LEARNING_RATE, LEARNING_RATE_SCHEDULE = "sgd", 0.5, "constant"
    DROPOUT_PROB = 0.2


def write_pairs(folder):
    """Writes sentences, and the same with each word the other way round."""
    rng = np.random.default_rng(3)
    sentences = [" ".join(rng.choice(WORDS, rng.integers(1, 5))) for _ in range(60)]
    pairs = [f"{text}\t{' '.join(word[::-1] for word in text.split())}\n" for text in sentences]
    for name, part in (("train", pairs[:48]), ("heldout", pairs[48:])):
        (folder / f"{name}.tsv").write_text("".join(part))
    return folder
