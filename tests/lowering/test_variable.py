"""Variables that are split, and their initial values."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError
from pipemesh.lowering import PlacementLowering, ops
from pipemesh.lowering import variable as variable_module
from pipemesh.lowering.variable import Constant, Normal, Uniform, Variable
from pipemesh.mesh import LayoutRules, Mesh, Shape

MESH = Mesh.from_text("a:2;b:4")
DEVICES = [f"CPU:{i}" for i in range(8)]
SHAPE = Shape.of(x=8, y=4, z=12)
RULES = ["", "x:a", "y:b", "z:a", "x:a;z:b", "x:b;y:a", "y:a;z:b"]


def create(rules, initializer, dtype=tf.float32):
    layout = LayoutRules.from_text(rules).tensor_layout(SHAPE, MESH)
    return Variable.create("w", layout, DEVICES, initializer, dtype)


@pytest.mark.parametrize(
    ("initializer", "most_drawn", "dtype"),
    [
        (Normal(0.5, (1, 2)), 1 << 22, tf.float32),
        (Normal(0.5, (1, 2)), 30, tf.float64),
        (Uniform(-1.0, 3.0, (1, 2)), 100, tf.float32),
        (Uniform(-1.0, 3.0, (1, 2)), 1, tf.bfloat16),
        (Constant(4.0), 1, tf.float32),
    ],
)
def test_the_initial_value_does_not_depend_on_the_layout(
    initializer, most_drawn, dtype, monkeypatch
):
    whole = create("", initializer, dtype).value()
    assert whole.dtype == dtype
    monkeypatch.setattr(variable_module, "MOST_DRAWN", most_drawn)
    for rules in RULES:
        variable = create(rules, initializer, dtype)
        np.testing.assert_array_equal(variable.value(), whole)
        for i, part in enumerate(variable.variables):
            assert part.device.endswith(f"CPU:{i}")
            np.testing.assert_array_equal(part, whole[variable.layout.slice_ranges(i)])


def test_no_device_draws_much_more_than_it_may(monkeypatch):
    drawn = []

    def spy(**given):
        drawn.append(int(np.prod(given["shape"])))
        return tf.raw_ops.StatelessRandomUniformV2(**given)

    monkeypatch.setattr(variable_module, "MOST_DRAWN", 30)
    sizes, begin, block = [64, 4, 12], [0, 0, 6], [64, 4, 6]
    variable_module._draw(spy, sizes, begin, block, (1, 2), tf.float32)
    # Numbers come in groups of four, of which one may be begun on either side.
    assert max(drawn) <= 30 + 3


def test_numbers_are_spread_as_asked_for():
    normal = Normal(0.5, (3, 4))([400, 100], [0, 0], [400, 100], tf.float32).numpy()
    uniform = Uniform(-1.0, 3.0, (3, 4))([400, 100], [0, 0], [400, 100], tf.float32).numpy()
    assert abs(normal.mean()) < 0.01 and abs(normal.std() - 0.5) < 0.01
    assert uniform.min() >= -1 and uniform.max() < 3 and abs(uniform.mean() - 1) < 0.03


@pytest.mark.parametrize(
    ("mesh", "rules", "message"),
    [
        ("a:2;b:2", "x:b", r"'w' lies on mesh 'a:2;b:2' as 'x:4/a;y:4'.*created"),
        ("a:2;b:2", "y:a", "rules 'y:a', by which it would be 'x:4;y:4/a'"),
        ("a:2;b:2", "", "would be 'x:4;y:4'"),
        ("a:2;b:2", "x:a;y:b", "would be 'x:4/a;y:4/b'"),
        ("b:2;a:2", "x:a", "the lowering has mesh 'b:2;a:2'"),
        ("a:2;b:2", "x:a;z:b", None),
    ],
)
def test_a_variable_is_no_tensor_under_other_rules(mesh, rules, message):
    """Its slices have the sizes that other rules ask for, but are other parts of the whole."""
    layout = LayoutRules.from_text("x:a").tensor_layout(
        Shape.of(x=4, y=4), Mesh.from_text("a:2;b:2")
    )
    variable = Variable.create("w", layout, DEVICES[:4], Constant(1.0))
    rules = LayoutRules.from_text(rules)
    lowering = PlacementLowering(Mesh.from_text(mesh), rules, DEVICES[:4])
    if message is None:
        assert variable.tensor(lowering).layout == layout
        return
    with pytest.raises(LayoutError, match=message):
        variable.tensor(lowering)


def test_a_variable_is_not_compared_as_an_object_by_mistake():
    variable = create("x:a", Constant(1.0))
    assert variable in [variable] and len({variable, create("x:a", Constant(1.0))}) == 2
    with pytest.raises(TypeError, match="compare its elements"):
        variable != 0  # noqa: B015


@pytest.mark.parametrize("rules", ["", "x:a", "x:a;z:b"])
def test_named_and_whole_values_are_assigned(rules):
    array = np.arange(SHAPE.size, dtype=np.float32).reshape(SHAPE.sizes)
    lowering = PlacementLowering(MESH, LayoutRules.from_text(rules), DEVICES)
    named = ops.import_tensor(lowering, array, SHAPE)
    for value, want in ((named, array), (named * 2.0, 2 * array), (array + 1, array + 1)):
        variable = create(rules, Constant(0.0))
        assert variable.assign(value) is None
        np.testing.assert_array_equal(variable.value(), want)
        for i, part in enumerate(variable.variables):
            np.testing.assert_array_equal(part, want[variable.layout.slice_ranges(i)])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = create(rules, Constant(0.0))
        done = variable.assign(variable.tensor(lowering) + 3.0)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(done)
        np.testing.assert_array_equal(session.run(variable.value()), np.full(SHAPE.sizes, 3.0))
