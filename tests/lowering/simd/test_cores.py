"""Programs of one core: what it takes to build them, and how they end after an error."""

import json
import subprocess

import pytest
import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.lowering.simd.cores import Cores
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import LayoutRules, Mesh, Shape
from tests.warm import warm

# In a process of its own, because after an error in a collective all later ones fail.
COMMON = """
import json, time
import tensorflow as tf
from pipemesh.lowering.simd import cores as cores_module
from pipemesh.backend.devices import start_cpu_devices
from pipemesh.mesh import LayoutRules
from tests.lowering.simd.test_cores import make
start_cpu_devices(3)
cores_module._PATIENCE_SECONDS = 0.5
"""


def make(text, **options):
    mesh = Mesh.from_text(text)
    return Cores(mesh, [f"CPU:{i}" for i in range(mesh.num_devices)], **options)


def run(code):
    """What the code prints, as JSON."""
    done = subprocess.run(warm("-c", COMMON + code), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_program_does_not_grow_with_the_number_of_cores():
    def program(lowering, x, w):
        x = ops.import_tensor(lowering, x, "batch:16;io:8")
        w = ops.import_tensor(lowering, w, "io:8;hidden:8")
        with tf.GradientTape() as tape:
            tape.watch(w.slices)
            loss = ops.reduce_mean(ops.softmax(ops.einsum([x, w], ["batch", "hidden"]), "hidden"))
        return tape.gradient(loss.slices, w.slices)

    rules = LayoutRules.from_text("batch:data;hidden:model")
    sizes = set()
    for text in ("data:2;model:2", "data:4;model:2", "data:2;model:4"):
        specs = [tf.TensorSpec([16, 8]), tf.TensorSpec([8, 8])]
        graph = make(text).function(program, rules, *specs).concrete.graph
        sizes.add(len(graph.get_operations()))
    assert len(sizes) == 1


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
def program(lowering, x, good):
    if not good:
        raise KeyError("ill")
    return lowering.all_reduce((x,), ["data"])[0]
begin = time.monotonic()
args = [[tf.constant(1.0), True], [tf.constant(2.0), False]]
try:
    make("data:2").run_eagerly(program, LayoutRules(), args)
except KeyError as error:
    print(json.dumps([str(error), time.monotonic() - begin < 30]))
""") == ["'ill'", True]


@pytest.mark.slow
def test_cores_that_do_not_do_the_same_are_told_apart_when_the_time_limit_is_over():
    name, text, seconds = run("""
def program(lowering, x, meets):
    return lowering.all_reduce((x,), ["data"])[0] if meets else x
args = [[tf.constant(1.0), i != 1] for i in range(3)]
begin = time.monotonic()
try:
    make("data:3", time_limit_s=1).run_eagerly(program, LayoutRules(), args)
except Exception as error:
    print(json.dumps([type(error).__name__, str(error), time.monotonic() - begin]))
""")
    assert name == "DeviceError"
    assert "cores 0, 2 of mesh 'data:3' were not done in 1 s, while cores 1 were." in text
    assert "time_limit_s" in text
    assert seconds < 30


def test_cores_see_nothing_of_the_callers_graph_and_tape():
    args = [[tf.constant(1.0)], [tf.constant(2.0)]]
    step = make("data:2").function(
        lambda lowering, x: lowering.all_reduce((x,), ["data"])[0], LayoutRules(), tf.TensorSpec([])
    )
    with tf.Graph().as_default():
        assert [float(y) for y in step(args)] == [3, 3]
    with tf.GradientTape() as tape:
        tape.watch(args)
        sums = step(args)
    assert tape.gradient(sums[0], args[0]) == [None]


def test_without_a_graph_a_program_gives_the_same_numbers_run_after_run():
    cores = make("rows:2;cols:4")

    def program(lowering, x):
        y = ops.rename(Tensor(lowering, (x,), Shape.of(a=8, b=8)), {"b": "c"})
        return ops.export_tensor(ops.square(ops.reduce_sum(y, "a")))

    rules = LayoutRules.from_text("a:rows;b:cols")
    args = [[tf.random.stateless_normal([4, 2], [i, 0])] for i in range(8)]
    first, second = (cores.run_eagerly(program, rules, args) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert bool(tf.reduce_all(one == other))
