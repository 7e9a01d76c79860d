"""Optimizers on weights that are cut into slices."""

import contextlib
import itertools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, learner, optimizer, py_utils

from pipemesh.backend.saved_state import Slice, create_slots, mark_slice, slice_of
from pipemesh.errors import PipelineError
from pipemesh.layers.named import FeedForward, by_logical_name, lowering_scope
from pipemesh.layers.optimizers import Adafactor
from pipemesh.layers.optimizers.checks import ELEMENTWISE, check_learner
from pipemesh.layers.optimizers.pieces import mark_matrix
from tests.layers.harness import executing
from tests.layers.named.harness import make_lowering

NAME = "layer/w/var"


def grid(sizes, cuts):
    """Returns the begin and the size of each slice."""
    lengths = [size // cut for size, cut in zip(sizes, cuts, strict=True)]
    begins = itertools.product(*(range(0, s, n) for s, n in zip(sizes, lengths, strict=True)))
    return [(begin, lengths) for begin in begins]


def part_of(whole, begin, lengths):
    return whole[tuple(slice(b, b + n) for b, n in zip(begin, lengths, strict=True))]


def make(value, cuts, name=NAME):
    """A variable, or its slices on several devices, with what each one's part is."""
    # As a layer is made, which makes TensorFlow count names below it anew.
    with tf.compat.v1.variable_scope(name.partition("/")[0]):
        parts = grid(value.shape, cuts)
    if len(parts) == 1:
        return [(tf.Variable(value, name=name), *parts[0])]
    found = []
    for number, (begin, lengths) in enumerate(parts):
        with tf.device(f"CPU:{number % 3}"):
            part = name.replace("/var", f"_slice_{number}/var")
            variable = tf.Variable(part_of(value, begin, lengths), name=part)
        mark_slice(variable, name, Slice(value.shape, begin))
        found.append((variable, begin, lengths))
    return found


def join(shape, parts, values):
    whole = np.zeros(shape, np.float32)
    for (begin, lengths), value in zip(parts, values, strict=True):
        part_of(whole, begin, lengths)[...] = value
    return whole


def train(params, value, grads, cuts, *, eager, rate=0.1, name=NAME, mark=None, beside=False):
    """Applies gradients, one a step; returns the whole weight after each step.

    `beside`: a matrix is trained, too.
    """
    with executing(eager) as step:
        made = make(value, cuts, name)
        for variable, _, _ in made if mark else ():
            mark_matrix(variable, mark)
        other = tf.Variable(tf.eye(2), name="beside/w/var") if beside else None
        parts = [(begin, lengths) for _, begin, lengths in made]
        optimizer = params.Instantiate()

        def apply(*slices):
            pairs = zip(made, slices, strict=True)
            var_grad = py_utils.NestedMap(
                {f"v{i}": py_utils.VarGrad(v, grad) for i, ((v, _, _), grad) in enumerate(pairs)}
            )
            if other is not None:
                var_grad.beside = py_utils.VarGrad(other, tf.ones([2, 2]))
            update = optimizer.Apply((lambda: tf.constant(rate)) if eager else rate, var_grad)
            with tf.control_dependencies([] if eager else [update]):
                return step.assign_add(1)

        found = []
        slices_of = [[part_of(grad, *part) for part in parts] for grad in grads]
        if eager:
            function = tf.function(apply, autograph=False)
            for slices in slices_of:
                function(*map(tf.constant, slices))
                found.append(join(value.shape, parts, [v.numpy() for v, _, _ in made]))
        else:
            feeds = [tf.compat.v1.placeholder(tf.float32, lengths) for _, lengths in parts]
            update = apply(*feeds)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                for slices in slices_of:
                    session.run(update, dict(zip(feeds, slices, strict=True)))
                    found.append(join(value.shape, parts, session.run([v for v, _, _ in made])))
        return found


SGD, SHAMPOO = optimizer.SGD.Params(), optimizer.DistributedShampoo.Params()


class Mine(optimizer.Adam):
    """Perhaps elementwise, perhaps not."""


class Elementwise(optimizer.Adam):
    right_on_slices = True


def composite(pattern, chosen=SGD):
    chosen = {pattern: (chosen, 0.1), "default_optimizer": (SGD, 0.1)}
    return optimizer.CompositeOptimizer.Params().Set(optimizer_map=chosen)


def slices():
    found = []
    for number in range(2):
        variable = tf.Variable([1.0, 2.0], name=f"layer/w_slice_{number}/var")
        mark_slice(variable, "layer/w/var", Slice((4,), (2 * number,)))
        found.append(variable)
    return found


@pytest.mark.parametrize(
    "options",
    [
        *({"optimizer": kind.Params()} for kind in (*ELEMENTWISE, Adafactor, Elementwise)),
        {"optimizer": optimizer.Accumulator.Params().Set(optimizer_tpl=SGD)},
        {"optimizer": composite(r"layer/w(_slice_\d+)?/var", Adafactor.Params())},
        {"clip_gradient_norm_to_value": 1.0, "skip_zero_gradients": "weight"},
        {"bprop_variable_filter": "layer", "bprop_variable_exclusion": "other"},
    ],
)
def test_what_is_right_on_slices_passes(options):
    check_learner(learner.Learner.Params().Set(name="loss", **options), slices())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"optimizer": SHAMPOO}, "optimizer DistributedShampoo .* use SGD, Momentum, .*Adafactor"),
        ({"optimizer": optimizer.AdaGraft.Params()}, "optimizer AdaGraft would take each"),
        (
            {"optimizer": optimizer.XLAShardingAdafactor.Params()},
            "use pipemesh.layers.optimizers.Adafactor, whose params are the same, or a layout",
        ),
        (
            {"optimizer": optimizer.XLAShardingAdafactorAccuGrad.Params()},
            "use pipemesh.layers.optimizers.Adafactor",
        ),
        ({"optimizer": Mine.Params()}, "optimizer Mine .* right_on_slices = True"),
        (
            {"optimizer": optimizer.Accumulator.Params().Set(optimizer_tpl=SHAMPOO)},
            "DistributedShampoo",
        ),
        ({"optimizer": composite("layer.*", SHAMPOO)}, "DistributedShampoo"),
        (
            {"optimizer": composite("layer/w/var")},
            "optimizer_map 'layer/w/var' finds 'layer/w/var:0' and not 'layer/w_slice_0/var:0'",
        ),
        (
            {"bprop_variable_filter": "_0/var"},
            "bprop_variable_filter '_0/var' finds 'layer/w_slice_0/var:0' and not 'layer/w/var:0'",
        ),
        ({"bprop_variable_exclusion": "/w/"}, "bprop_variable_exclusion '/w/' finds"),
        ({"clip_gradient_single_norm_to_value": 1.0}, "use clip_gradient_norm_to_value, or"),
        ({"skip_zero_gradients": "variable"}, "use 'weight' or None, or a layout"),
        ({"gradient_combiner": base_layer.BaseLayer.Params()}, "gradient_combiner BaseLayer is"),
    ],
)
def test_what_is_not_is_an_error_that_says_what_to_change(options, told):
    p = learner.Learner.Params().Set(name="loss", **options)
    with pytest.raises(PipelineError, match=told) as caught:
        check_learner(p, slices())
    assert "learner 'loss' is given slices of weights, such as 'layer/w_slice_0/var:0'" in str(
        caught.value
    )
    check_learner(p, [tf.Variable([1.0])])


@pytest.mark.parametrize(
    ("eager", "mesh", "refused"),
    [(True, "model:2", True), (False, "model:2", True), (False, "model:1", False)],
)
def test_learners_check_when_a_step_is_built(eager, mesh, refused):
    with executing(eager), lowering_scope(make_lowering(mesh)), tf.Graph().as_default():
        py_utils.GetOrCreateGlobalStepVar()
        layer = FeedForward.Params().Set(name="ff", input_dim=4, hidden_dim=8).Instantiate()
        p = learner.Learner.Params().Set(name="loss", optimizer=Mine.Params())
        learned = p.Instantiate()
        y = tf.add_n([tf.reduce_sum(v) for v in layer.vars.Flatten()])
        told = pytest.raises(PipelineError, match="optimizer Mine would take")
        with told if refused else contextlib.nullcontext():
            learned.Apply({"loss": (y, tf.constant(1.0))}, layer.vars)


STEPS = 3
# Sizes of a weight, and in how many slices each dim is cut.
CUTS = [
    ((12,), (3,)),
    ((6, 8), (2, 2)),
    ((8, 4, 6), (1, 1, 3)),
    ((8, 6, 4), (2, 1, 2)),
    ((6, 8, 2), (3, 2, 1)),
    ((4, 8, 6), (2, 2, 2)),
]
OPTIONS = [
    {"beta1": 0.9, "clipping_threshold": 0.5, "decay_exponent_pow": 0.8},
    {},
    {"multiply_by_parameter_scale": False, "beta1": 0.9, "beta2": 0.9},
    {"clipping_threshold": 0.5, "cond_is_finite": True},
    {"factored": False, "clipping_threshold": 1.0, "beta1": 0.5},
]
CHECKED = {"min_dim_size_to_factor": 3, "cond_is_finite": True, "beta1": 0.5}


def values(sizes):
    rng = np.random.default_rng(sum(sizes))
    draw = [rng.normal(size=sizes).astype(np.float32) for _ in range(STEPS + 1)]
    # Rows, columns and steps of different sizes.
    scale = np.exp(rng.normal(size=sizes)).astype(np.float32)
    return draw[0], [grad * scale * (i + 1) for i, grad in enumerate(draw[1:])]


def both(sizes, cuts, eager, outer=lambda inner: inner, infinite=False, **options):
    value, grads = values(sizes)
    if infinite:
        grads[1][5, 2] = np.inf
    options = {"min_dim_size_to_factor": 3, **options}
    whole = outer(optimizer.XLAShardingAdafactor.Params().Set(**options))
    mine = outer(Adafactor.Params().Set(**options))
    # lingvo's runs in graphs alone: eagerly its decay rate is a tensor of another graph.
    theirs = train(whole, value, grads, [1] * len(sizes), eager=False)
    return theirs, train(mine, value, grads, cuts, eager=eager)


def assert_all_close(theirs, ours):
    for one, other in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# All cuts with several options at once, and one with each of the others; the modes take turns.
ON_SLICES = [(cut, OPTIONS[0]) for cut in CUTS] + [(CUTS[3], options) for options in OPTIONS[1:]]


@pytest.mark.parametrize(("cut", "options"), ON_SLICES)
def test_on_slices_it_is_lingvos_on_the_whole_weight(cut, options):
    eager = ON_SLICES.index((cut, options)) % 2 == 0
    assert_all_close(*both(*cut, eager, **options))


def test_nothing_but_sums_of_rows_and_columns_and_numbers_travel():
    value = values((8, 6))[0]
    with executing(eager=False):
        made = make(value, (2, 2))
        grads = []
        for variable, _, lengths in made:
            with tf.device(variable.device):
                grads.append(tf.compat.v1.placeholder(tf.float32, lengths))
        pairs = [py_utils.VarGrad(v, g) for (v, _, _), g in zip(made, grads, strict=True)]
        params = Adafactor.Params().Set(**CHECKED, clipping_threshold=1.0)
        params.Instantiate().Apply(0.1, py_utils.NestedMap(w=pairs))
        operations = tf.compat.v1.get_default_graph().get_operations()
        tensors = [t for op in operations for t in op.outputs if t.dtype.is_floating]
        assert max(t.shape.num_elements() for t in tensors) == 4 * 3, "no more than a slice"
        sent = [
            tensor.shape.as_list()
            for op in operations
            for tensor in op.inputs
            if tensor.dtype.is_floating and _place(tensor.op) not in (op.device, "anywhere")
        ]
        # Rows' sums there, what they are multiplied by back; columns' as well.
        assert {tuple(shape) for shape in sent if shape} == {(4,), (3,)}


def _place(op):
    if op.type == "Const":
        return "anywhere"
    # What is read lies where the variable does.
    return op.inputs[0].device if op.type == "ReadVariableOp" else op.device


def accumulated(inner):
    return optimizer.Accumulator.Params().Set(optimizer_tpl=inner, accum_steps=2)


def chosen_by_name(inner):
    return composite(r"layer/w(_slice_\d+)?/var", inner)


@pytest.mark.parametrize("outer", [accumulated, chosen_by_name])
def test_inside_of_another_optimizer_it_is_lingvos_on_the_whole_weight(outer):
    theirs, ours = both((8, 6), (2, 3), False, outer, **CHECKED)
    assert not np.array_equal(ours[-1], values((8, 6))[0])
    assert_all_close(theirs, ours)


@pytest.mark.parametrize("eager", [True, False])
def test_a_step_that_is_not_finite_moves_no_slice(eager):
    theirs, ours = both((8, 6), (2, 3), eager, infinite=True, **CHECKED)
    np.testing.assert_array_equal(ours[1], ours[0])
    assert_all_close(theirs, ours)


def test_statistics_lie_beside_slices_and_are_whole_in_checkpoints(tmp_path):
    value = values((8, 6))[0]
    params = Adafactor.Params().Set(min_dim_size_to_factor=3, beta1=0.9)

    def made(cuts, fill):
        with executing(eager=True) as step:
            weights = [variable for variable, _, _ in make(value, cuts)]
            with py_utils.GlobalStepContext(step):
                slots = params.Instantiate().GetOptimizer(0.1)
            create_slots(slots, weights)
            for variable in slots.variables():
                if fill:
                    variable.assign(tf.random.normal(variable.shape))
        layer = py_utils.NestedMap(vars=py_utils.NestedMap(w=weights))
        names = by_logical_name(layer, slots.variables())
        return weights, slots.variables(), tf.train.Checkpoint(**_safe(names)), names

    _, before, saved, names = made((2, 3), True)
    # What slices share is one variable; of the columns' sums, the larger dim is gone first.
    sizes = {v.name: v.shape.as_list() for v in before if "Adafactor/" not in v.name}
    assert sizes == {
        **{f"{NAME}/Adafactor_1/slice_{i}:0": [2] for i in range(3)},
        **{f"{NAME}/Adafactor_2/slice_{i}:0": [4] for i in range(2)},
    }
    assert sorted(names) == [f"{NAME}/Adafactor{end}" for end in ("", "_1", "_2")]
    path = saved.write(str(tmp_path / "ckpt"))
    wholes = {}
    for cuts in [(2, 3), (1, 1), (4, 1), (1, 2)]:
        weights, after, target, now = made(cuts, False)
        assert sorted(now) == sorted(names)
        target.read(path).assert_consumed()
        homes = {variable.device for variable in weights}
        assert {variable.device for variable in after} <= homes
        for name, whole in _wholes(after).items():
            np.testing.assert_array_equal(whole, wholes.setdefault(name, whole))
    assert {name: whole.shape for name, whole in wholes.items()} == {
        f"{NAME}/Adafactor": (8, 6),
        f"{NAME}/Adafactor_1": (6,),
        f"{NAME}/Adafactor_2": (8,),
    }
    assert all(np.all(whole != 0) for whole in wholes.values())
    for name, whole in _wholes(before).items():
        np.testing.assert_array_equal(whole, wholes[name])


def _safe(names):
    return {name.replace("/", "."): value for name, value in names.items()}


def _wholes(variables):
    """Statistics by name, put together of their pieces."""
    wholes = {}
    for variable in variables:
        sizes = variable.shape.as_list()
        own = variable.name.removesuffix(":0"), Slice(tuple(sizes), (0,) * len(sizes))
        name, part = slice_of(variable) or own
        whole = wholes.setdefault(name, np.zeros(part.whole, np.float32))
        part_of(whole, part.begin, sizes)[...] = variable.numpy()
    return wholes


def test_a_weight_without_all_its_slices_is_an_error():
    value = values((8, 6))[0]
    with executing(eager=True):
        weights = [variable for variable, _, _ in make(value, (2, 1))]
        slots = Adafactor.Params().Instantiate().GetOptimizer(0.1)
        told = "weight 'layer/w/var' has 48 elements, but its slices with gradients have 24; update"
        with pytest.raises(PipelineError, match=told):
            slots.apply_gradients([(tf.ones([4, 6]), weights[0])])
        with pytest.raises(PipelineError, match="are the same slice of weight 'layer/w/var'; give"):
            slots.apply_gradients([(tf.ones([4, 6]), weights[i]) for i in (0, 0)])
        rows = tf.IndexedSlices(tf.ones([2, 6]), tf.constant([1, 1]), tf.constant([4, 6]))
        slots.apply_gradients(zip([rows, tf.zeros([4, 6])], weights, strict=True))
        moved = np.concatenate(weights) != value
        assert moved.all(axis=1).tolist() == [i == 1 for i in range(8)]
