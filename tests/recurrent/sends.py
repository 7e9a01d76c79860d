"""What TensorFlow sends between devices in a step, read from the graphs that it executed."""

import dataclasses

import tensorflow as tf

from pipemesh.backend.graphs import record_placement
from pipemesh.recurrent import Options, pipeline_loss


def trained(stages, inputs, schedule, step=None, **options):
    """A step that trains variables of zeros for the weights of stages, on their devices."""
    variables = []
    for stage in stages:
        variables.append([])
        for value, device in zip(stage.theta, stage.theta_devices, strict=True):
            with tf.device(device):
                variables[-1].append(tf.Variable(tf.zeros(value.shape)))
    with tf.device(stages[-1].device):
        seen = tf.Variable(0.0)

    @tf.function(autograph=False)
    def run():
        own = [
            dataclasses.replace(stage, theta=theta)
            for stage, theta in zip(stages, variables, strict=True)
        ]
        each = [variable for theta in variables for variable in theta]
        arguments = Options(**{"check_numerics": "off", "loop": False, **options})
        with tf.GradientTape() as tape:
            # Arrays become constants, of which each device has its copy.
            given = [x if tf.is_tensor(x) else tf.constant(x) for x in inputs]
            loss = pipeline_loss(own, given, schedule, step=step, options=arguments)[0]
        # What a function returns goes to the first device of all.
        for variable, grad in zip(each, tape.gradient(loss, each), strict=True):
            if grad is not None:
                variable.assign_sub(tf.convert_to_tensor(grad))
        seen.assign(loss)

    return run


def sends(run):
    """Runs a function for the first time; returns what it sends, as `sent_by` does."""
    with record_placement() as graphs:
        run()
    return sent_by(graphs)


def sent_by(graphs):
    """Yields for each sent tensor its node, its dtype, and the numbers of both devices."""
    for graph in graphs.partition_graphs:
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            # What waits for an operation elsewhere gets a constant from there.
            if node.op == "_Send" and "/ctrl/" not in node.input[0]:
                ends = (node.attr[f"{end}_device"].s.decode() for end in ("send", "recv"))
                numbers = [int(end.rsplit(":", 1)[1]) for end in ends]
                yield nodes[node.input[0].split(":")[0]], node.attr["T"].type, *numbers
