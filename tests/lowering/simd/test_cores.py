"""Programs of one core: primitives, gradients, costs, and what it takes to build them.

Those with errors in a process of their own, because after one in a collective all later ones fail.
"""

import json
import subprocess

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import DeviceError, ShapeError
from pipemesh.lowering import ops
from pipemesh.lowering.simd.cores import Cores
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import LayoutRules, Mesh, Shape
from tests.warm import warm

COMMON = """
import json
import tensorflow as tf
from pipemesh.lowering.simd import cores as cores_module
from pipemesh.lowering.simd.cores import Cores
from pipemesh.backend.devices import start_cpu_devices
from pipemesh.mesh import LayoutRules, Mesh
start_cpu_devices(8)
def make(text):
    mesh = Mesh.from_text(text)
    return Cores(mesh, [f"CPU:{i}" for i in range(mesh.num_devices)])
"""


def make(text):
    mesh = Mesh.from_text(text)
    return Cores(mesh, [f"CPU:{i}" for i in range(mesh.num_devices)])


def run(code):
    """What the code prints, as JSON."""
    done = subprocess.run(warm("-c", COMMON + code), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_primitives_talk_to_the_right_cores_and_gradients_go_back():
    cores = make("rows:2;cols:4")

    def program(lowering, x):
        def both(function):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function((x,))[0]
            return [y, tape.gradient(y, x, x + 100)]

        return {
            "reduce": both(lambda s: lowering.all_reduce(s, ["cols"])),
            "both axes": both(lambda s: lowering.all_reduce(s, ["cols", "rows"])),
            "max": lowering.all_reduce((x,), ["rows"], "max"),
            "vary": both(lambda s: lowering.vary(s, ["rows"])),
            "wrap": both(lambda s: lowering.shift(s, "cols", 1, wrap=True)),
            "shift": both(lambda s: lowering.shift(s, "rows", 1, wrap=False)),
            "at": [lowering.coordinate(axis)[0] for axis in ("rows", "cols")],
        }

    run = cores.function(program, LayoutRules(), tf.TensorSpec([], tf.float32))
    out = run([[tf.constant(float(i))] for i in range(8)])
    result = [tf.nest.map_structure(lambda t: t.numpy().item(), core) for core in out]
    for core, got in enumerate(result):
        row, col = divmod(core, 4)
        assert got["at"] == [row, col]
        assert got["reduce"] == [4 * 4 * row + 6, core + 100]
        assert got["both axes"] == [28, core + 100]
        assert got["max"] == (4 + col,)
        assert got["vary"] == [core, 204 + 2 * col]
        assert got["wrap"] == [4 * row + (col - 1) % 4, 100 + 4 * row + (col + 1) % 4]
        assert got["shift"] == [core - 4, 0] if row else [0, 104 + core]


def test_the_program_does_not_grow_with_the_number_of_cores():
    def program(lowering, x, w):
        x = ops.import_tensor(lowering, x, "batch:16;io:8")
        w = ops.import_tensor(lowering, w, "io:8;hidden:8")
        with tf.GradientTape() as tape:
            tape.watch(w.slices)
            loss = ops.reduce_mean(ops.softmax(ops.einsum([x, w], ["batch", "hidden"]), "hidden"))
        return tape.gradient(loss.slices, w.slices)

    rules = LayoutRules.from_text("batch:data;hidden:model")
    sizes = []
    for text in ("data:2;model:2", "data:4;model:2", "data:2;model:4"):
        specs = [tf.TensorSpec([16, 8]), tf.TensorSpec([8, 8])]
        graph = make(text).function(program, rules, *specs).concrete.graph
        sizes.append(len(graph.get_operations()))
    assert sizes[0] == sizes[1] == sizes[2]


def test_communication_of_a_two_layer_network_is_that_of_the_textbook():
    cores = make("data:2;model:2")

    def program(lowering, x, w1, w2):
        x = Tensor(lowering, (x,), Shape.of(batch=8, io=4))
        w1 = Tensor(lowering, (w1,), Shape.of(io=4, hidden=16))
        w2 = Tensor(lowering, (w2,), Shape.of(hidden=16, out=2))
        with tf.GradientTape() as tape:
            tape.watch([w1.slices, w2.slices, x.slices])
            hidden = ops.relu(ops.einsum([x, w1], ["batch", "hidden"]))
            out = ops.einsum([hidden, w2], ["batch", "out"])
        return tape.gradient(out.slices, [w1.slices, w2.slices, x.slices])

    rules = LayoutRules.from_text("batch:data;hidden:model")
    specs = [tf.TensorSpec([4, 4]), tf.TensorSpec([4, 8]), tf.TensorSpec([8, 2])]
    costs = cores.function(program, rules, *specs).lowering.costs
    rows = [[*key, *value] for key, value in costs.rows.items()]
    half = 2 * (2 - 1) / 2
    assert sorted(rows) == sorted(
        [
            # The output forward and the input backward over `model`: Megatron's g and f.
            [("model",), "all_reduce", "forward", 1, 4 * 2 * 4 * half],
            [("model",), "all_reduce", "backward", 1, 4 * 4 * 4 * half],
            # The gradients of both weights over `data`.
            [("data",), "all_reduce", "backward", 2, (4 * 8 + 8 * 2) * 4 * half],
        ]
    )


def test_an_error_of_one_core_comes_out_and_ends_the_others():
    assert run("""
found = []
def program(lowering, x):
    with tf.control_dependencies([tf.debugging.assert_less(x, 1.5)]):
        x = tf.identity(x)
    return lowering.all_reduce((x,), ["data"])[0]
for number in (1, 2):
    step = make(f"data:{number}").function(program, LayoutRules(), tf.TensorSpec([], tf.float32))
    try:
        step([[tf.constant(1.0)], [tf.constant(2.0)]][-number:])
    except (tf.errors.InvalidArgumentError, tf.errors.CancelledError) as error:
        # Of two cores the error that comes first: the core's own, or that of what waits for it.
        found.append(number == 2 or "assert" in str(error).lower())
print(json.dumps(found))
""") == [True, True]


@pytest.mark.slow
def test_an_error_of_one_core_alone_ends_the_others():
    assert run("""
import time
cores = make("data:2")
def program(lowering, x, good):
    if not good:
        raise KeyError("ill")
    return lowering.all_reduce((x,), ["data"])[0]
cores_module._PATIENCE_SECONDS = 0.5
begin = time.monotonic()
try:
    cores.run_eagerly(program, LayoutRules(), [[tf.constant(1.0), True], [tf.constant(2.0), False]])
except KeyError as error:
    print(json.dumps([str(error), time.monotonic() - begin < 30]))
""") == ["'ill'", True]


@pytest.mark.slow
def test_cores_that_do_not_do_the_same_are_told_apart_when_the_time_limit_is_over():
    name, text, seconds = run("""
import time
cores_module._PATIENCE_SECONDS = 0.5
mesh = Mesh.from_text("data:3")
cores = Cores(mesh, ["CPU:0", "CPU:1", "CPU:2"], time_limit_s=2)
def program(lowering, x, meets):
    return lowering.all_reduce((x,), ["data"])[0] if meets else x
args = [[tf.constant(1.0), i != 1] for i in range(3)]
begin = time.monotonic()
try:
    cores.run_eagerly(program, LayoutRules(), args)
except Exception as error:
    print(json.dumps([type(error).__name__, str(error), time.monotonic() - begin]))
""")
    assert name == "DeviceError"
    assert "cores 0, 2 of mesh 'data:3' were not done in 2 s, while cores 1 were." in text
    assert "time_limit_s" in text
    assert seconds < 30


def test_cores_see_nothing_of_the_callers_graph_tape_and_other_calls():
    cores = make("data:2")
    args = [[tf.constant(1.0)], [tf.constant(2.0)]]

    def program(lowering, x):
        return lowering.all_reduce((x,), ["data"])[0]

    step = cores.function(program, LayoutRules(), tf.TensorSpec([]))
    found = []
    with tf.Graph().as_default():
        found.append([float(y) for y in step(args)])
    with tf.GradientTape() as tape:
        tape.watch(args)
        sums = step(args)
    found.append([g is None for g in tape.gradient(sums[0], args[0])])
    for wrong in (args[:1], [*args, *args]):
        try:
            step(wrong)
        except ValueError as error:
            found.append(str(error).split(";")[0])
    assert found == [
        [3.0, 3.0],
        [True],
        "arguments for 1 cores were given",
        "arguments for 4 cores were given",
    ]


@pytest.mark.parametrize("devices", [[], ["CPU:0"], ["CPU:0", "CPU:1", "CPU:2"]])
def test_each_core_needs_a_device(devices):
    with pytest.raises(DeviceError, match=f"{len(devices)} devices .* one device for each core"):
        Cores(Mesh.from_text("data:2"), devices)


@pytest.mark.parametrize(
    "again", ["CPU:1", "/device:CPU:1", "/job:localhost/replica:0/task:0/device:CPU:1"]
)
def test_a_device_for_two_cores_is_an_error_however_it_is_spelt(again):
    with pytest.raises(DeviceError, match="was given for 2 cores; cores wait for each other"):
        Cores(Mesh.from_text("data:3"), ["CPU:0", "CPU:1", again])


@pytest.mark.parametrize("limit", [0, -1.0])
def test_a_time_limit_of_nothing_is_an_error(limit):
    with pytest.raises(DeviceError, match="it is above 0, or None for ever"):
        Cores(Mesh.from_text("data:1"), ["CPU:0"], time_limit_s=limit)


def lost_rows(*slices):
    """Sums a batch of four on two cores, which were traced for two rows each."""
    mesh = Mesh.from_text("data:2")
    step = Cores(mesh, ["CPU:0", "CPU:1"]).function(
        lambda lowering, x: ops.export_tensor(
            ops.reduce_sum(Tensor(lowering, (x,), Shape.of(batch=4)))
        ),
        LayoutRules.from_text("batch:data"),
        tf.TensorSpec([2]),
    )
    return [float(y) for y in step(slices)]


def test_slices_of_other_sizes_than_the_specs_are_an_error_and_no_rows_get_lost():
    two = [tf.ones([2])]
    assert lost_rows(two, two) == [4, 4]
    for size in (1, 3, 4, 8):
        with pytest.raises(ShapeError, match=r"argument 0 of core 1 is float32 of sizes \(\d,\)"):
            lost_rows(two, [tf.ones([size])])
        with pytest.raises(ShapeError, match=r"argument 0 of core 1 is float32 of sizes \(\d,\)"):
            lost_rows(two, [np.ones(size, np.float32)])
    with pytest.raises(ShapeError, match=r"of core 0 is int32 .* was built for float32"):
        lost_rows([tf.ones([2], tf.int32)], two)
    with pytest.raises(ShapeError, match="core 1 was given 2 arguments; the program was built for"):
        lost_rows(two, [*two, *two])


def test_without_a_graph_a_program_gives_the_same_numbers_run_after_run():
    cores = make("rows:2;cols:4")

    def program(lowering, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = ops.reduce_sum(
                ops.rename(Tensor(lowering, (x,), Shape.of(a=8, b=8)), {"b": "c"}), "a"
            )
            value = ops.export_tensor(ops.square(y))
        return value, tape.gradient(value, x)

    rules = LayoutRules.from_text("a:rows;b:cols")
    args = [[tf.random.stateless_normal([4, 2], [i, 0])] for i in range(8)]
    graph = cores.function(program, rules, tf.TensorSpec([4, 2]))(args)
    eager = [cores.run_eagerly(program, rules, args) for _ in range(2)]

    def gap(a, b):
        pairs = zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)
        return max(float(tf.reduce_max(tf.abs(x - y))) for x, y in pairs)

    result = [gap(run, graph) for run in eager] + [gap(eager[0], eager[1])]
    assert max(result[:2]) < 1e-5
    assert result[2] == 0
