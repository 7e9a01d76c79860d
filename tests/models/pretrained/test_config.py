"""What a config.json says, and what layers here have not."""

import json

import pytest

from models.pretrained.config import WeightsError, ends_of, of_folder, of_values, read

GPT2, LLAMA = {"model_type": "gpt2"}, {"model_type": "llama"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


def test_what_a_file_leaves_out_is_that_of_the_smallest_model():
    gpt2, llama = of_values(GPT2), of_values(LLAMA)
    assert (gpt2.vocab_size, gpt2.max_length) == (50257, 1024)
    assert (gpt2.head_dim, gpt2.hidden_dim) == (64, 3072)
    assert gpt2.tied and gpt2.attention_bias and gpt2.rotary_base is None and not gpt2.is_gated
    assert (llama.num_layers, llama.num_kv_heads) == (32, 32)
    assert (llama.head_dim, llama.hidden_dim) == (128, 11008)
    assert not llama.tied and not llama.attention_bias and llama.is_gated
    # Nothing is said where nothing is otherwise.
    assert gpt2.notes == ("in training no weight of attention is dropped, where attn_pdrop is 0.1",)
    assert llama.notes == ()


@pytest.mark.parametrize(
    "given",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_the_base_of_rotations_stands_where_older_and_newer_files_have_it(given):
    assert of_values(LLAMA | given).rotary_base == 5e5


def test_rotations_may_be_slower():
    assert of_values(LLAMA).rotary_scaling is None
    found = of_values(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert found.rotary_scaling == {"factor": 2.0}
    found = of_values(LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3})
    assert found.rotary_scaling == {"factor": 8.0, "length": 8192, "low": 1.0, "high": 4.0}
    assert found.rotary_base == 5e5


def test_tokens_that_end_a_text_may_be_several():
    found = of_values(LLAMA | {"bos_token_id": 1, "eos_token_id": [2, 9]})
    assert (found.bos, found.eos) == (1, (2, 9))
    assert of_values(GPT2 | {"eos_token_id": 7}).eos == (7,)
    assert of_values(GPT2).eos == ()


def test_what_ends_a_text_is_said_by_the_file_beside_it_first(tmp_path):
    config = of_values(LLAMA | {"eos_token_id": 2})
    assert ends_of(str(tmp_path), config) == ({2}, ())
    beside = tmp_path / "generation_config.json"
    for content, ends in (("{}", {2}), ('{"eos_token_id": [2, 9]}', {2, 9})):
        beside.write_text(content)
        assert ends_of(str(tmp_path), config) == (ends, ())
    beside.write_text('{"eos_token_id": "end"}')
    with pytest.raises(WeightsError, match=r"generation_config\.json: eos_token_id is 'end'"):
        ends_of(str(tmp_path), config)


def test_tokens_beyond_the_vocabulary_play_no_part(tmp_path):
    """Every text was refused where one ends texts, as in files of small models of a large one."""
    config = of_values(LLAMA | {"vocab_size": 9, "bos_token_id": 9, "eos_token_id": [2, 99]})
    assert (config.bos, config.eos) == (None, (2,))
    told = "config.json: {} plays no part: the model has the ids 0 to 8"
    assert config.notes == (told.format("bos_token_id 9"), told.format("eos_token_id 99"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 99]}')
    ends, (note,) = ends_of(str(tmp_path), config)
    assert ends == {3} and note.startswith(str(tmp_path)) and "eos_token_id 99 plays no" in note


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "model_type is None"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        (GPT2 | {"activation_function": []}, r"activation_function is \[\]; there are gelu, "),
        (GPT2 | {"eos_token_id": True}, "eos_token_id is True; it is the number of a token"),
        (GPT2 | {"layer_norm_epsilon": float("inf")}, "layer_norm_epsilon is inf; it is finite"),
        (LLAMA | {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it is above 0"),
        (LLAMA | {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*; it is finite"),
        (LLAMA | {"rope_scaling": {"rope_type": []}}, r"rope_type is \[\]; supported are default"),
        ({"model_type": "lama"}, "model_type is 'lama'.*llama"),
        ({"model_type": "bert"}, "model_type is 'bert'.*gpt2.*llama"),
        (GPT2 | {"n_layer": 0}, "n_layer is 0; it is a whole number from 1 on"),
        (GPT2 | {"n_layer": "12"}, "n_layer is '12'; it is a whole number"),
        (GPT2 | {"n_embd": 10, "n_head": 4}, "n_embd is 10, which n_head 4 does not divide"),
        (GPT2 | {"activation_function": "tanh"}, "activation_function is 'tanh'; there are gelu, "),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True; .* false"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights is False; .* may be true"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention is True"),
        (GPT2 | {"quantization_config": {}}, "quantization_config is {}; weights are numbers"),
        (GPT2 | {"resid_pdrop": 1.0}, "resid_pdrop is 1.0; a rate of dropout is below 1"),
        (GPT2 | {"layer_norm_epsilon": -1}, "layer_norm_epsilon is -1; it is above 0"),
        (GPT2 | {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it is true or false"),
        (GPT2 | {"eos_token_id": "end"}, "eos_token_id is 'end'; it is the number of a token"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act is 'gelu'; there are silu, swish"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide"),
        (LLAMA | {"head_dim": 5}, "heads have 5 elements, but pairs"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; whole heads"),
        (LLAMA | {"rope_scaling": {"type": "yarn"}}, "'yarn'; supported are default, linear, lla"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_scaling has no 'factor', which"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5; it is 1 or"),
        (LLAMA | {"rope_parameters": LLAMA3 | {"high_freq_factor": 1}}, "high_freq_factor 1.0, "),
        (LLAMA | {"rope_parameters": {"rope_type": "llama3"}}, "has no 'low_freq_factor', which"),
        (LLAMA | {"rope_scaling": 2}, "rope_scaling is 2; it is an object of JSON"),
        (LLAMA | {"rope_theta": "high"}, "rope_theta is 'high'; it is a number"),
    ],
)
def test_what_cannot_be_had_is_said_with_what_can(tmp_path, values, told):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(WeightsError, match=told) as error:
        read(str(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON"),
        ("[]", "holds no object of JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_none_is_told(tmp_path, content, told):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(WeightsError, match=told):
        read(str(path))


def test_a_folder_without_one_is_told_by_the_flag_that_names_it(tmp_path):
    """With `--checkpoint` of another training it sounded as if that could not be read."""
    with pytest.raises(WeightsError, match="give as --logdir a folder that has one"):
        of_folder(str(tmp_path))
