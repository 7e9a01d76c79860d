"""One table of weights has both directions."""

import numpy as np
import pytest

from models.pretrained import config, names
from models.pretrained.config import WeightsError
from tests.models.pretrained import small


@pytest.fixture(params=small.KINDS)
def model(request):
    return config.of_values(small.KINDS[request.param])


def test_every_number_there_is_one_here(model):
    weights = names.weights_of(model)
    assert len({weight.name for weight in weights}) == len(weights)
    for _, parts in names.by_theirs(weights):
        there = np.arange(np.prod(parts[0].there)).reshape(parts[0].there)
        here = [weight.from_theirs(there[weight.index]) for weight in parts]
        assert [each.shape for each in here] == [weight.shape for weight in parts]
        back = [weight.to_theirs(each) for weight, each in zip(parts, here, strict=True)]
        np.testing.assert_array_equal(np.concatenate(back, -1), there)


def test_heads_stand_where_products_there_have_them():
    found = {weight.theirs: weight for weight in names.weights_of(config.of_values(small.LLAMA))}
    weight = found["model.layers.1.self_attn.k_proj.weight"]
    x, there = np.random.default_rng(0).standard_normal([2, 8, 16])[0, 0], np.eye(8, 16)
    np.testing.assert_allclose(
        np.einsum("e,ehd->hd", x, weight.from_theirs(there)).reshape(-1), there @ x
    )
    assert weight.name == "language_model/cell_002/attention/w_k/var"


def test_files_may_leave_the_prefix_out_and_have_constants(model):
    weights = names.weights_of(model)
    prefix = {"gpt2": "transformer.", "llama": "model."}[model.model_type]
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
    assert names.HEAD not in there
    assert len(names.as_in([*there, names.HEAD], weights, tied)) == len(weights)
    untied = config.of_values(small.LLAMA)
    weights = names.weights_of(untied)
    assert names.HEAD in [weight.theirs for weight in weights]
    assert names.tied_of(untied) == {} and names.tied_of(tied) == {"cell_003.w": "cell_000.table"}
