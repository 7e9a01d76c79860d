"""Every layer with named dims: the same under every layout, lowering and mode of TensorFlow."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError
from pipemesh.layers.named import by_logical_name
from pipemesh.layers.named.tally import PRODUCTS
from pipemesh.mesh import LayoutRules
from tests.conformance.layer_cases import (
    CASES,
    CLASSES,
    MESH,
    of_classes,
    placement,
    sampled_layouts,
)
from tests.conformance.layer_runs import call, plain, run_simd, run_tf1, run_tf2
from tests.layers.harness import executing
from tests.layers.named.harness import made


def test_every_layer_of_the_room_has_a_case():
    assert not [name for name, cases in of_classes().items() if not cases]
    assert set(CLASSES) >= {"Attention", "FeedForward", "TransformerBlock"}


# Which layouts are legal takes seconds to find out: not while tests are collected.
@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES)
def test_outputs_and_gradients_do_not_depend_on_the_layout(kind):
    for name, rules in sampled_layouts(kind):
        check_layout(name, rules)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_every_layout_gives_the_same(name):
    for rules in CASES[name].layouts:
        check_layout(name, str(rules))


def check_layout(name, rules):
    case, lowering = CASES[name], placement(LayoutRules.from_text(rules))
    found = run_tf2(case, lowering, in_graph=False)
    found.assert_close(plain(name))
    # What was sent is what FPropMeta says.
    meta = case.meta(lowering)
    assert meta.communication.rows == lowering.costs.rows
    assert meta.communication_bytes == MESH.num_devices * lowering.costs.total_bytes
    assert products(meta.communication) == products(lowering.costs)


def products(costs):
    """Calls and flops of products, by axes, operation and pass."""
    return {key: row[:2] for key, row in costs.work.items() if key[1] in PRODUCTS}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(cases[-1].name, marks=pytest.mark.exhaustive if "Block" in kind else ())
        for kind, cases in of_classes().items()
        if kind not in ("BatchNorm", "Norm", "Dropout")
    ],
)
def test_what_cannot_be_split_is_an_error_and_no_other_number(name):
    case = CASES[name]
    illegal = [set(rules.rules) for rules in case.all_layouts() if not case.is_legal(rules)]
    assert illegal
    # More rules beside illegal ones are illegal for the same reason.
    smallest = [rules for rules in illegal if not any(others < rules for others in illegal)]
    for rules in (LayoutRules(tuple(sorted(rules))) for rules in smallest):
        with executing(eager=True), pytest.raises(LayoutError, match=r"remove|change|write"):
            lowering = placement(rules)
            layer, _, _ = made(case.params, lowering)
            call(layer, lowering, layer.theta, case.inputs)


# One of each class, without those that are in others, and the block, which models train.
SOME = [
    cases[-1].name
    for kind, cases in of_classes().items()
    if kind not in ("TransformerBlock", "FeedForward", "Norm", "Dropout")
]


def in_turn(*modes):
    """The cases of `SOME`, the modes taking turns; the rest is `exhaustive`."""
    chosen = {(name, modes[number % len(modes)]) for number, name in enumerate(SOME)}
    return [
        pytest.param(*pair, marks=() if pair in chosen else pytest.mark.exhaustive)
        for pair in itertools.product(CASES, modes)
    ]


@pytest.mark.parametrize(("name", "run"), in_turn(run_tf1, run_tf2))
def test_in_graphs_of_both_tensorflows(name, run):
    case = CASES[name]
    lowering = placement(case.most_split)
    run(case, lowering).assert_close(plain(name))
    assert case.meta(lowering).communication.rows == lowering.costs.rows


@pytest.mark.parametrize(("name", "run"), in_turn(run_simd))
def test_the_program_of_a_core_computes_the_same(name, run):
    case, wanted = CASES[name], plain(name)
    for outputs, grads in run(case, case.most_split):
        for mine, theirs in zip(outputs, wanted.outputs, strict=True):
            np.testing.assert_allclose(mine, theirs, 2e-4, 2e-5)
        for path, theirs in wanted.grads.items():
            mine = grads[path]
            if isinstance(mine, tuple):
                mine, part = mine
                theirs = theirs[part]
                # Without padding.
                mine = mine[tuple(map(slice, theirs.shape))] if mine.size else mine
            np.testing.assert_allclose(mine, theirs, 2e-4, 2e-5, err_msg=path)


@pytest.mark.parametrize("name", SOME)
def test_what_one_layout_saved_another_one_restores(name, tmp_path):
    case = CASES[name]
    layouts = [*itertools.islice(case.by_size(largest_first=True), 2), next(case.by_size())]
    checkpoint = str(tmp_path / "weights")
    for i, rules in enumerate(layouts):
        with executing(eager=True):
            layer, values, _ = made(case.params, placement(rules))
            variables = dict(layer.vars.FlattenItems())
            tracked = tf.train.Checkpoint(**by_logical_name(layer, list(variables.values())))
            if i == 0:
                for path, value in values.items():
                    variables[path].assign(value)
                tracked.write(checkpoint)
            else:
                tracked.read(checkpoint).assert_consumed()
            for path, value in values.items():
                np.testing.assert_array_equal(variables[path], value)
