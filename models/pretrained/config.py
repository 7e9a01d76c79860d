"""Reads and checks `config.json`, the sizes of a model of the package `transformers`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pipemesh.text import nearest_text

from .families import FAMILIES, Config
from .values import Given, WeightsError, json_object

FILE = "config.json"
# The optional file with decoding settings beside it.
GENERATION = "generation_config.json"
# Keys of all types that do not change what a model computes: where it came from, its dtype, initial
# weights, special tokens, other outputs, other heads, and settings of decoding.
_IGNORED = frozenset(
    """
    _attn_implementation_autoset _commit_hash _name_or_path architectures dtype finetuning_task
    gradient_checkpointing initializer_range model_type torch_dtype torchscript transformers_version
    unsloth_fixed unsloth_version use_bfloat16 use_cache
    _num_labels n_special output_past predict_special_tokens is_llama_config
    bos_token_id cls_token_id decoder_start_token_id eos_token_id forced_bos_token_id
    forced_eos_token_id mask_token_id pad_token_id prefix sep_token_id tokenizer_class unk_token_id
    chunk_size_feed_forward cross_attention_hidden_size id2label is_decoder label2id
    output_attentions output_hidden_states output_scores problem_type return_dict
    return_dict_in_generate task_specific_params tf_legacy_loss tie_encoder_decoder
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty length_penalty max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    remove_invalid_values repetition_penalty suppress_tokens temperature top_k top_p typical_p
    """.split()
)


def read(path: str) -> Config:
    """Reads a `config.json`; raises WeightsError if it is unreadable, or its model is not
    supported.
    """
    return of_values(json_object(path), path)


def of_folder(folder: str) -> Config:
    """Reads the `config.json` of a log directory, or of a folder of weights."""
    path = os.path.join(folder, FILE)
    if not os.path.exists(path):
        raise WeightsError(
            f"there is no {path}, which says how large the model is; give as --logdir a folder "
            "that has one, whichever checkpoint is taken, or begin with `pipemesh checkpoint "
            "import --from=model.safetensors --logdir=RUN`"
        )
    return read(path)


def ends_of(folder: str, config: Config) -> tuple[frozenset[int], tuple[str, ...]]:
    """Returns the tokens that end a text, and notes about tokens that the model lacks.

    A `generation_config.json` in the folder overrides the model's file.
    """
    path = os.path.join(folder, GENERATION)
    if not os.path.exists(path):
        return frozenset(config.eos), ()
    given = Given(json_object(path), path)
    ends = given.tokens("eos_token_id", config.vocab_size) or config.eos
    return frozenset(ends), tuple(given.notes)


def of_values(values: Mapping[str, Any], path: str = FILE) -> Config:
    """Returns the model in the values of a `config.json`; errors name `path`.

    Example:
        >>> config = of_values({"model_type": "gpt2", "n_layer": 2})
        >>> config.num_layers, config.model_dim, config.hidden_dim, config.activation
        (2, 768, 3072, 'GELU_APPROXIMATE')
        >>> of_values({"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}})
        Traceback (most recent call last):
        models.pretrained.values.WeightsError: config.json: rope_type is 'yarn'; supported are \
default, linear, llama3
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        near = nearest_text(str(model_type), FAMILIES)
        raise WeightsError(f"{path}: model_type is {model_type!r}{near}")
    given, family = Given(values, path), FAMILIES[model_type]
    for name in sorted({"quantization_config", "auto_map"} - family.ignored):
        given.only(name, [None], "weights are numbers, and the model is what its type says")
    given.only("add_cross_attention", [False, None], "a token sees its own text")
    pair = [True] if family.memory_norm else [False, None]
    given.only("is_encoder_decoder", pair, "the type of the model says whether it is one")
    given.only("pruned_heads", [{}, None], "all heads are there")
    config = family.read(given)
    given.check_rest(_IGNORED | family.ignored)
    return config
