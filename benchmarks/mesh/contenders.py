"""One process of the benchmark: computes a step whenever it is asked to.

    python benchmarks/mesh/contenders.py NAME

reads lines of two words from its input, network and mesh, and answers with a line of JSON:
seconds and seconds of CPU time of a forward and backward step. If the third word is `check`, it
answers with the loss and the norms of all gradients. With `build` for a name it builds steps for
more and more devices and prints what that takes; with `memory`, what devices keep of volumes.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import networks
import numpy as np
import tensorflow as tf

PEERS = pathlib.Path(__file__).with_name("peers")
# Computes a step and returns its loss; returns the slices of all gradients, device by device.
Step = tuple[Callable[[], float], Callable[[], Sequence[Sequence[np.ndarray]]]]


def layouts(network: str, mesh_text: str):
    mesh, rules = networks.plan(mesh_text)
    return [rules.tensor_layout(shape, mesh) for shape in networks.shapes(network).values()]


def slices(network: str, mesh_text: str) -> list[list[tf.Tensor]]:
    """For each input and weight its slices, on their devices."""
    parts = []
    values = networks.arrays(network).values()
    for layout, array in zip(layouts(network, mesh_text), values, strict=True):
        parts.append([])
        for i in range(layout.mesh.num_devices):
            with tf.device(f"CPU:{i}"):
                parts[-1].append(tf.constant(array[layout.slice_ranges(i)]))
    return parts


def plain(network: str, mesh_text: str) -> Step:
    values = [tf.constant(array) for array in networks.arrays(network).values()]

    @tf.function(autograph=False)
    def step(x, *weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = networks.tensorflow_loss(network, x, *weights)
        return loss, tape.gradient(loss, weights)

    return (
        lambda: float(step(*values)[0]),
        lambda: [[grad.numpy()] for grad in step(*values)[1]],
    )


def build_placement(network: str, mesh_text: str):
    """The concrete function, and its arguments."""
    from pipemesh.lowering import PlacementLowering, Tensor

    mesh, rules = networks.plan(mesh_text)
    shapes = networks.shapes(network).values()

    def step(x, *weights):
        lowering = PlacementLowering(mesh, rules, [f"CPU:{i}" for i in range(mesh.num_devices)])
        with tf.GradientTape() as tape:
            tape.watch(weights)
            operands = [
                Tensor(lowering, tuple(parts), shape)
                for parts, shape in zip((x, *weights), shapes, strict=True)
            ]
            loss = networks.pipemesh_loss(network, *operands)
        return loss.slices[0], tape.gradient(loss.slices, weights)

    values = slices(network, mesh_text)
    # Arguments arrive on the first device, captured tensors where they are.
    return tf.function(lambda: step(*values), autograph=False).get_concrete_function(), ()


def placement(network: str, mesh_text: str) -> Step:
    step, args = build_placement(network, mesh_text)
    return (
        lambda: float(step(*args)[0]),
        lambda: [[part.numpy() for part in grad] for grad in step(*args)[1]],
    )


def build_simd(network: str, mesh_text: str):
    """The function of all cores, and its arguments."""
    from pipemesh.lowering import Cores, Tensor

    mesh, rules = networks.plan(mesh_text)
    shapes = networks.shapes(network).values()

    def step(lowering, x, *weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            operands = [
                Tensor(lowering, (part,), shape)
                for part, shape in zip((x, *weights), shapes, strict=True)
            ]
            loss = networks.pipemesh_loss(network, *operands)
        return loss.slices[0], tape.gradient(loss.slices[0], weights)

    cores = Cores(mesh, [f"CPU:{i}" for i in range(mesh.num_devices)])
    parts = slices(network, mesh_text)
    specs = [tf.TensorSpec.from_tensor(part[0]) for part in parts]
    return cores.function(step, rules, *specs), list(zip(*parts, strict=True))


def simd(network: str, mesh_text: str) -> Step:
    step, args = build_simd(network, mesh_text)
    return (
        lambda: float(step(args)[0][0]),
        lambda: [
            [part.numpy() for part in grad]
            for grad in zip(*(grads for _, grads in step(args)), strict=True)
        ],
    )


def dtensor(network: str, mesh_text: str) -> Step:
    from tensorflow.experimental import dtensor as dt

    layout_of = layouts(network, mesh_text)
    mesh = layout_of[0].mesh
    dt_mesh = dt.create_mesh(list(mesh.axes), devices=[f"CPU:{i}" for i in range(mesh.num_devices)])
    dt_layouts = [
        dt.Layout([axis or dt.UNSHARDED for axis in layout.axes], dt_mesh) for layout in layout_of
    ]
    parts = slices(network, mesh_text)
    values = [dt.pack(part, layout) for part, layout in zip(parts, dt_layouts, strict=True)]

    @tf.function(autograph=False)
    def step(x, *weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = networks.tensorflow_loss(network, x, *weights)
        grads = tape.gradient(loss, weights)
        return loss, [dt.relayout_like(g, w) for g, w in zip(grads, weights, strict=True)]

    return (
        lambda: float(step(*values)[0]),
        lambda: [[part.numpy() for part in dt.unpack(grad)] for grad in step(*values)[1]],
    )


@functools.cache
def load_mesh_tensorflow():
    """Version 0.1.21, which TensorFlow 2.21 no longer has two names for."""
    import tensorflow.compat.v1 as tf1
    from tensorflow.python.framework import ops

    # Only behind what is installed: it brings packages that are needed by others as well.
    sys.path.append(str(PEERS))
    # Base classes of hooks, which are not used here; and a function that has moved.
    tf1.estimator = tf1.train
    ops.register_tensor_conversion_function = tf.register_tensor_conversion_function
    import mesh_tensorflow

    return mesh_tensorflow


def mesh_tensorflow(network: str, mesh_text: str) -> Step:
    mtf = load_mesh_tensorflow()
    tf1 = tf.compat.v1
    _, rules = networks.plan(mesh_text)
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x, *weights = (
            mtf.get_variable(
                mesh,
                name,
                mtf.Shape([mtf.Dimension(dim.name, dim.size) for dim in shape]),
                initializer=tf1.constant_initializer(networks.arrays(network)[name]),
            )
            for name, shape in networks.shapes(network).items()
        )
        loss = networks.mesh_tensorflow_loss(network, mtf, x, *weights)
        grads = mtf.gradients([loss], weights)
        implementation = mtf.placement_mesh_impl.PlacementMeshImpl(
            mtf.convert_to_shape(mesh_text),
            mtf.convert_to_layout_rules(str(rules)),
            ["cpu:0", "cpu:1"],
        )
        lowering = mtf.Lowering(graph, {mesh: implementation})
        whole = lowering.export_to_tf_tensor(loss)
        parts = [lowering.tensors[grad].to_laid_out_tensor().tensor_list for grad in grads]
        config = tf1.ConfigProto(
            device_count={"CPU": 2},
            inter_op_parallelism_threads=2,
            intra_op_parallelism_threads=1,
        )
        session = tf1.Session(config=config)
        session.run(tf1.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
    # A callable, because `run` looks at what it is given every time. Gradients are computed and
    # stay where they are.
    run = session.make_callable([whole, *(part.op for grad in parts for part in grad)])
    return lambda: float(run()[0]), lambda: session.run(parts)


STEPS = {
    "plain": plain,
    "pipemesh placement": placement,
    "pipemesh SIMD": simd,
    "DTensor": dtensor,
    "Mesh TensorFlow": mesh_tensorflow,
}


def norms(network: str, mesh_text: str, grads: Sequence[Sequence[np.ndarray]]) -> list[float]:
    """The norm of each whole gradient."""
    found = []
    for layout, parts in zip(layouts(network, mesh_text)[1:], grads, strict=True):
        whole = np.full(layout.shape.sizes, np.nan)
        for i, part in enumerate(parts):
            whole[layout.slice_ranges(i) if len(parts) > 1 else ...] = part
        found.append(float(np.linalg.norm(whole)))
    return found


def start(num_devices: int, intra_op: int) -> None:
    # The benchmark is about two cores, however many there are.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * num_devices,
    )
    tf.config.threading.set_inter_op_parallelism_threads(max(2, num_devices))
    tf.config.threading.set_intra_op_parallelism_threads(intra_op)


def serve(name: str) -> None:
    start(*(1, 2) if name == "plain" else (2, 1))
    make = functools.cache(STEPS[name])
    for line in sys.stdin:
        network, mesh_text, *check = line.split()
        run, grads = make(network, mesh_text)
        if check:
            answer = [run(), *norms(network, mesh_text, grads())]
        else:
            begin, cpu = time.perf_counter(), time.process_time()
            run()
            answer = [time.perf_counter() - begin, time.process_time() - cpu]
        print(json.dumps(answer), flush=True)


def build() -> None:
    """Prints the time of building a step for 1, 2, 4 and 8 devices, in lines of JSON."""
    start(8, 1)
    for name, make in (("placement", build_placement), ("SIMD", build_simd)):
        # What TensorFlow loads when it traces for the first time is nobody's fault.
        make("mlp", "model:2")
        for network in networks.SHAPES:
            for devices in (1, 2, 4, 8):
                begin = time.perf_counter()
                step, args = make(network, f"model:{devices}")
                traced = time.perf_counter()
                step(*args) if name == "placement" else step(args)
                first = time.perf_counter() - traced
                concrete = step if name == "placement" else step.concrete
                graph = concrete.graph.as_graph_def()
                nodes = len(graph.node) + sum(len(f.node_def) for f in graph.library.function)
                row = [network, name, devices, nodes, traced - begin, first]
                print(json.dumps(row), flush=True)


# Operations whose results have the memory of their inputs.
VIEWS = {"Reshape", "Identity", "IdentityN", "Squeeze", "ExpandDims", "StopGradient"}


def kept(graph: tf.Graph, number: int) -> dict[str, int]:
    """The bytes that each device keeps of the first operations of a graph for the others."""
    operations = graph.get_operations()
    found = {}
    for operation in operations[number:]:
        for tensor in operation.inputs:
            while tensor.op.type in VIEWS:
                tensor = tensor.op.inputs[tensor.value_index]
            found[tensor.ref()] = tensor
    early = set(operations[:number])
    sums: dict[str, int] = {}
    for tensor in found.values():
        if tensor.op in early and tensor.op.type not in ("Const", "Placeholder"):
            size = tensor.shape.num_elements() * tensor.dtype.size
            sums[tensor.device] = sums.get(tensor.device, 0) + size
    return sums


def memory() -> None:
    """Prints the bytes of a U-Net that a device keeps for the backward pass, in lines of JSON."""
    from models.unet.network import UNet
    from pipemesh.lowering import PlacementLowering, ops
    from pipemesh.mesh import LayoutRules, Mesh

    start(8, 1)
    network = UNet(1, networks.SIDE, num_channels=8, num_levels=2, seed=0)
    for mesh_text, rules in networks.SPLIT_VOLUMES.items():
        mesh = Mesh.from_text(mesh_text)
        devices = [f"CPU:{i}" for i in range(mesh.num_devices)]
        lowering = PlacementLowering(mesh, LayoutRules.from_text(rules), devices)
        with tf.Graph().as_default() as graph:
            values = [
                ops.import_tensor(lowering, tf.zeros(part.shape.sizes, dtype), part.shape)
                for part, dtype in [
                    *((part, part.dtype) for part in network.inputs),
                    *((weight, tf.float32) for weight in network.weights),
                ]
            ]
            inputs, weights = values[:2], values[2:]
            loss, _ = network.forward(inputs, weights)
            number = len(graph.get_operations())
            ops.gradients(loss, weights)
        print(json.dumps([mesh_text, rules, max(kept(graph, number).values())]), flush=True)


if __name__ == "__main__":
    of_name = {"build": build, "memory": memory}
    of_name.get(sys.argv[1], lambda: serve(sys.argv[1]))()
