"""What TensorFlow sends between devices in a step, read from the graphs that it executed."""

from pipemesh.recurrent import record_placement


def sends(run):
    """Runs a function for the first time; yields what is sent.

    Each is the node that makes the tensor, its dtype, and the numbers of both devices.
    """
    with record_placement() as graphs:
        run()
    for graph in graphs.partition_graphs:
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            # What waits for an operation elsewhere gets a constant from there.
            if node.op == "_Send" and "/ctrl/" not in node.input[0]:
                ends = (node.attr[f"{end}_device"].s.decode() for end in ("send", "recv"))
                numbers = [int(end.rsplit(":", 1)[1]) for end in ends]
                yield nodes[node.input[0].split(":")[0]], node.attr["T"].type, *numbers
