"""Every layer with named dims: the same under every layout, lowering and mode of TensorFlow."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import LayoutError
from pipemesh.layers.named import by_logical_name
from pipemesh.mesh import LayoutRules
from tests.conformance.layer_cases import CASES, CLASSES, MESH, of_classes, placement, with_layouts
from tests.conformance.layer_runs import (
    call,
    executing,
    make,
    plain,
    rules_of,
    run_simd,
    run_tf1,
    run_tf2,
)


def test_every_layer_of_the_room_has_a_case():
    assert not [name for name, cases in of_classes().items() if not cases]
    assert set(CLASSES) >= {"Attention", "FeedForward", "TransformerBlock"}


@pytest.mark.parametrize(("name", "rules"), with_layouts())
def test_outputs_and_gradients_do_not_depend_on_the_layout(name, rules):
    case, lowering = CASES[name], placement(rules_of(rules))
    found = run_tf2(case, lowering, in_graph=False)
    found.assert_close(plain(name))
    # What was sent is what FPropMeta says.
    assert case.tally(lowering).costs.rows == lowering.costs.rows
    sent = MESH.num_devices * lowering.costs.total_bytes
    assert case.meta(lowering).communication_bytes == sent


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if "Block" in name else ())
        for name in (cases[-1].name for cases in of_classes().values())
    ],
)
def test_what_cannot_be_split_is_an_error_and_no_other_number(name):
    case = CASES[name]
    illegal = [set(rules.rules) for rules in case.all_layouts() if not case.is_legal(rules)]
    assert illegal or name.startswith(("Norm", "Dropout"))
    # More rules beside illegal ones are illegal for the same reason.
    smallest = [rules for rules in illegal if not any(others < rules for others in illegal)]
    for rules in (LayoutRules(tuple(sorted(rules))) for rules in smallest):
        with executing(eagerly=True), pytest.raises(LayoutError, match=r"remove|change|write"):
            py_utils.GetOrCreateGlobalStepVar()
            lowering = placement(rules)
            layer, _, _ = make(case, lowering)
            call(layer, lowering, layer.theta, case.inputs)


# One of each class.
SOME = [cases[-1].name for cases in of_classes().values()]


def in_turn(*modes):
    """One case of each class, the modes taking turns; the rest is `exhaustive`."""
    return [
        pytest.param(
            name,
            mode,
            marks=()
            if name in SOME and SOME.index(name) % len(modes) == number
            else pytest.mark.exhaustive,
        )
        for name in CASES
        for number, mode in enumerate(modes)
    ]


def some_cases():
    """One case of each class; the rest is `exhaustive`."""
    marks = {name: () if name in SOME else pytest.mark.exhaustive for name in CASES}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


@pytest.mark.parametrize(("name", "mode"), in_turn("tf1", "tf2"))
def test_in_graphs_of_both_tensorflows(name, mode):
    case = CASES[name]
    lowering = placement(case.most_split)
    (run_tf1 if mode == "tf1" else run_tf2)(case, lowering).assert_close(plain(name))
    assert case.tally(lowering).costs.rows == lowering.costs.rows


@pytest.mark.parametrize("name", some_cases())
def test_the_program_of_a_core_computes_the_same(name):
    case, wanted = CASES[name], plain(name)
    for outputs, grads in run_simd(case, case.most_split):
        for mine, theirs in zip(outputs, wanted.outputs, strict=True):
            np.testing.assert_allclose(mine, theirs, 2e-4, 2e-5)
        for path, theirs in wanted.grads.items():
            mine, part = grads[path] if isinstance(grads[path], tuple) else (grads[path], ...)
            np.testing.assert_allclose(mine, theirs[part], 2e-4, 2e-5, err_msg=path)


@pytest.mark.parametrize("name", [name for name in SOME if not name.startswith("Dropout")])
def test_what_one_layout_saved_another_one_restores(name, tmp_path):
    case = CASES[name]
    layouts = sorted(case.layouts, key=lambda rules: len(rules.rules))
    checkpoint = str(tmp_path / "weights")
    for i, rules in enumerate([layouts[-1], layouts[-2], layouts[0]]):
        with executing(eagerly=True):
            layer, values, _ = make(case, placement(rules))
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
