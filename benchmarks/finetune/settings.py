"""The model, the batch and the settings of both contenders, without TensorFlow and torch."""

from __future__ import annotations

import sys

import numpy as np

MODES = ["full", "frozen", "lora"]
# Instead of a mode: no step, for the memory that a library takes by itself.
IMPORTS = "imports"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "max_position_embeddings": 256,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
ROWS, LENGTH, MICROBATCHES = 16, 128, 8
# Of stage 0 and 1. Stage 0 keeps two microbatches.
REMAT = {"full": "full,none", "frozen": "none", "lora": "none"}
RATE, WEIGHT_DECAY = 1e-3, 0.01
LORA_RANK, LORA_ALPHA = 8, 16.0
# The embedding, which is the head's table, too, and the lower half of the blocks.
FROZEN_BLOCKS = 4
FROZEN = rf"cell_00[0-{FROZEN_BLOCKS}]/"


def leave_out(*packages: str) -> None:
    """Hides packages that others import where they find them, and that no step needs.

    So memory does not depend on what else an environment has.
    """
    sys.modules.update(dict.fromkeys(packages))


def token_ids() -> np.ndarray:
    """The one batch, with the token after the last."""
    shape = [ROWS, LENGTH + 1]
    return np.random.default_rng(1).integers(0, CONFIG["vocab_size"], shape).astype(np.int32)
