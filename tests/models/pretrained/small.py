"""Tiny models of others with random weights, as files, made without their packages."""

import json

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from models.pretrained import config, names

# A plan of a pipeline of two stages, each split over two devices.
SPLIT = {
    "mesh": "layers:2;model:2",
    "layout": "heads:model;d_ff:model;vocab:model",
    "num_microbatches": "2",
}
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
_OTHERS = LLAMA | {"bos_token_id": None, "pad_token_id": None}
QWEN2 = _OTHERS | {
    "model_type": "qwen2",
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 5,
    "max_window_layers": 1,
}
MISTRAL = _OTHERS | {"model_type": "mistral", "sliding_window": 4, "head_dim": 6}
QWEN3 = _OTHERS | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True}
MIXTRAL = _OTHERS | {"model_type": "mixtral", "num_local_experts": 4, "rms_norm_eps": 0.03}
GEMMA = _OTHERS | {"model_type": "gemma", "head_dim": 8}
GEMMA2 = _OTHERS | {
    "model_type": "gemma2",
    "num_hidden_layers": 3,
    "head_dim": 8,
    "query_pre_attn_scalar": 6,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "sliding_window": 5,
}
PHI3 = _OTHERS | {
    "model_type": "phi3",
    "sliding_window": 6,
    "partial_rotary_factor": 0.5,
}
GPT_NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 24,
    "max_position_embeddings": 16,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "layer_norm_eps": 0.02,
    "rotary_emb_base": 50.0,
    "rotary_pct": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
}
SERIAL_NEOX = GPT_NEOX | {"use_parallel_residual": False, "attention_bias": False}
OPT = {
    "model_type": "opt",
    "vocab_size": 24,
    "max_position_embeddings": 16,
    "hidden_size": 16,
    "ffn_dim": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
BERT = {
    "model_type": "bert",
    "vocab_size": 24,
    "max_position_embeddings": 16,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "type_vocab_size": 3,
    "layer_norm_eps": 0.02,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "eos_token_id": None,
    "pad_token_id": None,
}
T5 = {
    "model_type": "t5",
    "vocab_size": 24,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 12,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "layer_norm_epsilon": 0.02,
    "dropout_rate": 0.0,
    "is_encoder_decoder": True,
    "eos_token_id": None,
}
# Version 1.1.
GATED_T5 = T5 | {
    "num_decoder_layers": None,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
KINDS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "rich llama": RICH_LLAMA,
    "qwen2": QWEN2,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "phi3": PHI3,
    "gpt_neox": GPT_NEOX,
    "serial gpt_neox": SERIAL_NEOX,
    "opt": OPT,
    "bert": BERT,
    # As few blocks as share a bias, on one side in each.
    "t5": T5 | {"num_layers": 1, "num_decoder_layers": 2},
    "gated t5": GATED_T5 | {"num_decoder_layers": 1},
}


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
