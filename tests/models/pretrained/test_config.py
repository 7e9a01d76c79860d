"""config.json: sizes, names of weights, and the registered models."""

import json

import numpy as np
import pytest
import tensorflow as tf

from models.pretrained import config, names, params, transfer
from models.pretrained.config import ends_of, of_folder, of_values, read
from models.pretrained.families import FAMILIES
from models.pretrained.values import WeightsError
from pipemesh.errors import PlanError
from pipemesh.layers import DatasetInput
from pipemesh.layers.named import RotaryScaling
from pipemesh.plan import Plan
from pipemesh.training.registered import RegisteredModel
from pipemesh.training.run import Options
from pipemesh.training.trainer import Trainer
from tests.models.pretrained import small

GPT2, LLAMA = {"model_type": "gpt2"}, {"model_type": "llama"}
QWEN2, MIXTRAL = {"model_type": "qwen2"}, {"model_type": "mixtral"}
BERT, T5 = {"model_type": "bert"}, {"model_type": "t5"}
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
    ("given", "base", "scaling"),
    [
        ({}, 1e4, None),
        # Older and newer files have the base elsewhere.
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, {"factor": 2.0}),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            5e5,
            {"factor": 8.0, "length": 8192, "low": 1.0, "high": 4.0},
        ),
    ],
)
def test_rotations_may_have_another_base_and_be_slower(given, base, scaling):
    found = of_values(LLAMA | given)
    assert (found.rotary_base, found.rotary_scaling) == (base, scaling)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"model_type": "mistral"}, (4096,) * 32),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        (MIXTRAL, ()),
        (QWEN2 | {"sliding_window": 7}, ()),
        (QWEN2 | {"use_sliding_window": True}, (None,) * 28 + (4096,) * 4),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": None}, ()),
        ({"model_type": "gemma2", "sliding_window": 8}, (8, None) * 13),
        ({"model_type": "gemma2", "layer_types": ["full_attention"] * 26}, ()),
    ],
)
def test_windows_are_those_of_the_package(values, wanted):
    assert of_values(values).windows == wanted


def test_keys_without_effect_are_ignored():
    """A list of all types, and of a family; null is no value."""
    known = {"architectures": ["Any"], "torch_dtype": "bfloat16", "use_cache": False}
    assert of_values(LLAMA | known | {"pretraining_tp": 2, "anything": None}) == of_values(LLAMA)
    phi3 = {"model_type": "phi3"}
    unused = {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.1}
    assert of_values(phi3 | unused) == of_values(phi3)
    assert of_values(GPT2 | {"n_inner": None}) == of_values(GPT2)


def test_what_ends_a_text_is_said_by_the_file_beside_it_first(tmp_path):
    found = of_values(LLAMA | {"bos_token_id": 1, "eos_token_id": [2, 9]})
    assert (found.bos, found.eos) == (1, (2, 9))
    assert of_values(GPT2).eos == ()
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
        ({"model_type": "albert"}, "model_type is 'albert'.*bert.*llama"),
        (GPT2 | {"n_layer": 0}, "n_layer is 0; it is a whole number from 1 to"),
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
        (LLAMA | {"sliding_window": 4}, "sliding_window is 4, but this type of model has no such"),
        (LLAMA | {"rms_norm_epsilon": 1}, "rms_norm_epsilon .* did you mean 'rms_norm_eps'"),
        (LLAMA | {"use_qk_norm": False}, "use_qk_norm is False, but this type of model has no su"),
        (LLAMA | {"rope_scaling": {"beta_fast": 3}}, "rope_scaling: beta_fast is 3, but this typ"),
        (LLAMA | {"auto_map": {"AutoConfig": "a.B"}}, "auto_map is .*; weights are numbers"),
        (LLAMA | {"pruned_heads": {"0": [1]}}, "pruned_heads is .*; all heads are there"),
        (QWEN2 | {"layer_types": ["full"] * 32}, "layer_types is .*; it is a list of full_attent"),
        (QWEN2 | {"layer_types": []}, r"layer_types is \[\]; there are 32 layers"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 32}, "but no sliding_window is in use"),
        (MIXTRAL | {"num_experts_per_tok": 1}, "num_experts_per_tok is 1; a token meets two"),
        (MIXTRAL | {"num_local_experts": 1}, "num_local_experts is 1; a token meets two experts"),
        (MIXTRAL | {"output_router_logits": True}, "output_router_logits is True; experts are bal"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; the inputs of the"),
        ({"model_type": "gemma", "hidden_act": "silu"}, "hidden_act is 'silu'; there are gelu"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "a token sees only thos"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "'longrope'; supported a"),
        ({"model_type": "phi3", "attention_bias": True}, "attention_bias is True; attention has"),
        ({"model_type": "gpt_neox", "rotary_pct": 0.04}, "the part 0.04 of heads have 3 elements"),
        ({"model_type": "gpt_neox", "rotary_pct": 1.5}, "the part 1.5 of heads have 144 elements"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before is False; n"),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "word_embed_proj_dim is 512; vectors"),
        ({"model_type": "opt", "layerdrop": 0.1}, "layerdrop is 0.1; no block is skipped"),
        (BERT | {"is_decoder": True}, "is_decoder is True; a token sees both sides"),
        (BERT | {"position_embedding_type": "relative_key"}, "relative_key'; each position"),
        (BERT | {"tie_word_embeddings": False}, "tie_word_embeddings is False; logits use the"),
        (BERT | {"is_encoder_decoder": True}, "is_encoder_decoder is True; the type of the"),
        (BERT | {"embedding_size": 64}, "embedding_size is 64, but this type of model has no"),
        (T5 | {"is_encoder_decoder": False}, "is_encoder_decoder is False; .* may be true"),
        (T5 | {"feed_forward_proj": "gated-relu"}, "feed_forward_proj is 'gated-relu'; there are"),
        (T5 | {"dense_act_fn": "gelu"}, "dense_act_fn is 'gelu'; feed_forward_proj is 'relu'"),
        (T5 | {"tie_encoder_decoder": True}, "tie_encoder_decoder is True; both sides have"),
        # In `transformers`, too, null is no default.
        (GPT2 | {"n_layer": None}, "n_layer is None; it is a whole number from 1 to"),
        (GPT2 | {"scale_attn_weights": None}, "scale_attn_weights is None; .* may be true"),
        (LLAMA | {"rms_norm_eps": None}, "rms_norm_eps is None; it is a number"),
        (LLAMA | {"tie_word_embeddings": None}, "tie_word_embeddings is None; it is true or fal"),
        (LLAMA | {"rope_theta": None}, "rope_theta is None; it is a number"),
        (LLAMA | {"rope_parameters": {"rope_theta": None}}, "rope_theta is None; it is a number"),
        (LLAMA | {"rope_parameters": LLAMA3 | {"factor": None}}, "factor is None; it is a number"),
        ({"model_type": "gemma2", "sliding_window": None}, "sliding_window is None; it is a who"),
        ({"model_type": "phi3", "partial_rotary_factor": None}, "rotary_factor is None; it is a"),
        ({"model_type": "gpt_neox", "use_parallel_residual": None}, "residual is None; it is tr"),
        ({"model_type": "opt", "do_layer_norm_before": None}, "do_layer_norm_before is None; nor"),
        # Of both, `transformers` ignores one, and which one depends on its version.
        (
            LLAMA | {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
            "has rope_scaling and rope_parameters; remove one of them",
        ),
        (LLAMA | {"rope_interleaved": True}, "rope_interleaved is True, but this type of model"),
        (LLAMA | {"rope_parameters": {"rope_interleaved": True}}, "rope_interleaved is True, but"),
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
    if content is None:
        with pytest.raises(WeightsError, match="give as --logdir a folder that has one"):
            of_folder(str(tmp_path))


@pytest.fixture(params=small.KINDS)
def model(request):
    return config.of_values(small.KINDS[request.param])


def filled(weight, there):
    """The weight here that a tensor of a file makes."""
    here = np.zeros(weight.shape)
    weight.as_theirs(here)[...] = there.reshape(weight.grouped)[weight.index]
    return here


def test_every_number_there_is_one_here(model):
    weights = names.weights_of(model)
    assert len({(weight.name, weight.expert) for weight in weights}) == len(weights)
    for _, parts in names.by_theirs(weights):
        there = np.arange(np.prod(parts[0].there)).reshape(parts[0].there)
        here = [filled(weight, there) for weight in parts]
        np.testing.assert_array_equal(names.joined(parts, here), there)
    for name, parts in names.by_ours(weights):
        experts = [weight.expert for weight in parts]
        assert experts in ([None], list(range(parts[0].shape[0]))), name


def test_a_side_of_t5_has_one_bias_by_distance():
    t5 = config.of_values(small.T5)
    biases = [w.name for w in names.weights_of(t5) if "relative_bias" in w.name]
    one, other = (f"cell_{cell:03d}.attention.relative_bias" for cell in (1, 4))
    assert biases == [f"language_model/{name.replace('.', '/')}/var" for name in (one, other)]
    assert names.tied_of(t5) == {
        "cell_007.w": "cell_000.table",
        "cell_003.table": "cell_000.table",
        "cell_002.attention.relative_bias": one,
        "cell_005.attention.relative_bias": other,
        "cell_006.attention.relative_bias": other,
    }
    # Newer files call version 1.1 tied, and note apart that it does not scale.
    newer = T5 | {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    for values in (newer, T5 | {"tie_word_embeddings": False}):
        found = of_values(values)
        assert not found.tied and found.logit_scale == 1
    assert of_values(T5).tied and of_values(T5).logit_scale == 512**-0.5


def test_bert_has_older_names_and_heads_of_other_objectives():
    bert = config.of_values(small.BERT)
    weights = names.weights_of(bert)
    there = [weight.theirs for weight in weights]
    older = [
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        )
        for name in there
    ]
    assert older != there
    spare = ["bert.pooler.dense.weight", "cls.seq_relationship.bias"]
    copies = ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"]
    found = names.as_in([*older, *spare, *copies, "bert.embeddings.position_ids"], weights, bert)
    assert [weight.theirs for weight in found] == older
    assert names.unused_in([*there, *spare], bert) == spare


def test_heads_stand_where_products_there_have_them():
    found = {weight.theirs: weight for weight in names.weights_of(config.of_values(small.LLAMA))}
    weight = found["model.layers.1.self_attn.k_proj.weight"]
    x, there = np.random.default_rng(0).standard_normal([2, 8, 16])[0, 0], np.eye(8, 16)
    np.testing.assert_allclose(
        np.einsum("e,ehd->hd", x, filled(weight, there)).reshape(-1), there @ x
    )
    assert weight.name == "language_model/cell_002/attention/w_k/var"


def test_files_may_leave_the_prefix_out_and_have_constants(model):
    weights = names.weights_of(model)
    prefix = FAMILIES[model.model_type].prefix
    bare = [weight.theirs.removeprefix(prefix) for weight in weights]
    constants = ["h.0.attn.bias", "layers.0.self_attn.rotary_emb.inv_freq"]
    found = names.as_in([*bare, *constants], weights, model)
    assert [weight.theirs for weight in found] == bare
    assert [weight.name for weight in found] == [weight.name for weight in weights]


def test_what_is_missing_and_what_is_beyond_is_named(model):
    weights = names.weights_of(model)
    there = [weight.theirs for weight in weights]
    less = [name for name in there if name != weights[-1].theirs]
    with pytest.raises(WeightsError, match=f"no tensor '{weights[-1].theirs}', which the model of"):
        names.as_in(less, weights, model)
    with pytest.raises(WeightsError, match="there are 1 tensors that the model of"):
        names.as_in([*there, "another.weight"], weights, model)


def test_logits_by_the_table_need_no_weight_but_may_come_with_it():
    tied = config.of_values(small.GPT2)
    weights = names.weights_of(tied)
    there = [weight.theirs for weight in weights]
    assert names.head_of(tied) not in there
    assert len(names.as_in([*there, names.head_of(tied)], weights, tied)) == len(weights)
    untied = config.of_values(small.LLAMA)
    weights = names.weights_of(untied)
    assert names.head_of(untied) in [weight.theirs for weight in weights]
    assert names.tied_of(untied) == {} and names.tied_of(tied) == {"cell_003.w": "cell_000.table"}


class Averaged(params.Gpt2):
    """Keeps moving averages; there are batches of nothing."""

    PLAN = Plan("layers:1", num_microbatches=1)
    BATCH_SIZE, SEQUENCE_LENGTH = 1, 2

    def Train(self):
        rows = {name: tf.zeros([1, 2], tf.int32) for name in ("ids", "labels", "segment_pos")}
        rows |= {"weights": tf.ones([1, 2]), "segment_ids": tf.ones([1, 2], tf.int32)}
        return DatasetInput.Params().Set(
            name="Train", dataset=lambda: tf.data.Dataset.from_tensors(rows)
        )

    def Task(self):
        p = super().Task()
        p.train.ema_decay = 0.9
        return p


@pytest.mark.slow
@pytest.mark.usefixtures("eagerly")
def test_averages_begin_with_the_weights_that_came(tmp_path):
    small.write(tmp_path / "in", small.GPT2, small.tensors_of(small.GPT2))
    transfer.import_weights(str(tmp_path / "in"), str(tmp_path / "run"))
    model = Averaged()
    model.LOGDIR = str(tmp_path / "run")
    options = Options(logdir=model.LOGDIR, steps=1)
    trainer = Trainer(RegisteredModel(model, "Averaged"), options, f"{model.LOGDIR}/ckpt-0", True)
    trained = trainer.trained
    variables = trained.task.vars.Flatten()
    assert len(trained.averages()) == len(variables) > 20
    for variable in variables:
        average = trained.task.ema.average(variable)
        np.testing.assert_array_equal(average.numpy(), variable.numpy(), err_msg=variable.name)
    # Begun elsewhere, every one of these is drawn.
    assert len({float(tf.reduce_sum(variable)) for variable in variables}) == len(variables)


def test_the_file_says_the_sizes_and_the_class_the_rest(tmp_path):
    model = params.Llama()
    with pytest.raises(WeightsError, match="which says how large the model is"):
        model.Task()
    model.CONFIG = config.of_values(small.RICH_LLAMA)
    assert params.length_of(model) == 16
    embedding, block, _, head = params.layers_of(model.CONFIG)
    assert (embedding.vocab_size, embedding.positions, embedding.dropout_rate) == (24, "none", 0)
    assert (block.attention_tpl.dim_per_head, block.attention_tpl.num_kv_heads) == (8, 2)
    assert block.attention_tpl.rotary_scaling == RotaryScaling(5.0, length=8, low=0.1, high=1.0)
    assert block.attention_tpl.rotary_base == 50.0 and block.attention_tpl.use_bias
    assert block.norm_tpl.kind == head.norm_tpl.kind == "rms"
    assert block.feed_forward_tpl.activation == "SWIGLU"
    dropped = small.GPT2 | {"embd_pdrop": 0.2, "resid_pdrop": 0.3}
    for asked, rates in ((None, (0.2, 0.3)), (0.1, (0.1, 0.1)), (0.0, (0.0, 0.0))):
        first, block, *_ = params.layers_of(config.of_values(dropped), asked)
        assert (first.dropout_rate, block.dropout_rate) == rates
    (tmp_path / "config.json").write_text(json.dumps(small.GPT2))
    model = params.Llama()
    model.LOGDIR = str(tmp_path)
    with pytest.raises(WeightsError, match="Llama has model_type 'llama', but"):
        model.Task()


def test_a_batch_that_does_not_divide_is_told_by_the_flag():
    model = params.Gpt2()
    model.CONFIG = config.of_values(small.GPT2)
    values = {"num_microbatches": "16"}
    with pytest.raises(PlanError, match=r"num_microbatches=16: a batch of 8 .* --batch_size$"):
        RegisteredModel(model, "Gpt2", values)


def test_stages_are_cut_for_the_length_of_targets():
    """Targets of spans are short, those of pairs as long as their sources."""
    cut = []
    for rate in (0.15, 0.0):
        model = params.T5()
        model.CONFIG, model.CORRUPTION_RATE = of_values(T5 | {"num_layers": 4}), rate
        cut.append(len(params.stages_of(model)[0].sub))
    # The embedding and four blocks of the encoder come first.
    assert cut[0] < 6 <= cut[1]


def test_there_is_data_to_judge_by_where_there_is_text():
    model = params.Gpt2()
    model.CONFIG = config.of_values(small.GPT2)
    assert list(model.GetAllDatasetParams()) == ["Train"]
    model.TRAIN_DATA, model.HELDOUT_DATA = "a", "b"
    found = model.GetAllDatasetParams()
    assert list(found) == ["Train", "Dev", "Test"]
    assert [found[name].dataset.sources for name in ("Train", "Dev")] == ["a", "b"]
