"""Tiny models of others with random weights, as files, made without their packages."""

import json

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from models.pretrained import config, names

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 24,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 12,
    "layer_norm_epsilon": 0.02,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "eos_token_id": None,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 24,
    "max_position_embeddings": 16,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 0.02,
    "rope_theta": 50.0,
    "eos_token_id": None,
}
# What else a Llama may have: heads of a size of their own, biases, one table, slower rotations: of
# the four of a head one is as it was, one as slow as any, and two are between.
RICH_LLAMA = LLAMA | {
    "head_dim": 8,
    "rope_theta": None,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 50.0,
        "factor": 5.0,
        "low_freq_factor": 0.1,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8,
    },
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
}
KINDS = {"gpt2": GPT2, "llama": LLAMA, "rich llama": RICH_LLAMA}


def tensors_of(values, dtype=np.float32, seed=7):
    """Random ones of the names and shapes that they have there, by which texts are no monotone."""
    rng = np.random.default_rng(seed)
    weights = names.weights_of(config.of_values(values))
    return {
        theirs: (0.3 * rng.standard_normal(parts[0].there)).astype(dtype)
        for theirs, parts in names.by_theirs(weights)
    }


def write(folder, values, tensors):
    """The two files of a model; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


WORDS = ["[UNK]", "[BOS]", "the", "cat", "sat", "on", "mat", "a"]


def write_tokenizer(folder):
    """A tokenizer of some words, which begins each text with a token of its own."""
    words = {word: number for number, word in enumerate(WORDS)}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.add_special_tokens(["[BOS]"])
    found.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 1)]
    )
    found.save(str(folder / "tokenizer.json"))
