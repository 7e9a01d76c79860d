"""Names the stage, layer, microbatch and replica of a failed step in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.labels import labelled
from pipemesh.errors import PipelineError
from pipemesh.recurrent.stage import Home

_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_ACTION = re.compile(r"(?:^|/)action_\d+([FRBIW])(\d+)(?:\.(\d+))?(?=/)")
# The message of `finite_values.raise_unless`.
_NOT_FINITE = re.compile(r"assertion failed: \[(stage .*? is not finite \(NaN or infinite\))\]")
_PREAMBLE = re.compile(
    r"Graph execution error|Detected at node|<stack traces|Node: |\d+ root error|\s*$"
)
_CODE = re.compile(r"^\s*(\(\d+\)\s*)?[A-Z_]+:\s+")


def explain(
    error: tf.errors.OpError, devices: Mapping[str, Home | str | Sequence[str]] | None = None
) -> PipelineError | None:
    """Turns an error of TensorFlow into one line that locates it in the pipeline.

    TensorFlow names the failed operation. Its name contains the stage, the layer (as given to
    `layer_scope`) and, if there are several, the replica. In a TF2 function it also contains the
    microbatch and the direction. In a TF1 session the names of inlined functions lack the
    microbatch, and operations inside loops and branches lack the stage, too.

    Args:
        error: the error of the step.
        devices: for the name of each stage its home or device; the line names the device of the
            replica.

    Returns:
        The error to raise `from` the given one; None if it did not occur in a stage.

    Example:
        >>> node = "action_1F5/PartitionedCall/stage.first/layer.block3/GatherV2"
        >>> message = "Out of range: 7\\n\\t [[{{node " + node + "}}]]"
        >>> error = tf.errors.InvalidArgumentError(None, None, message)
        >>> print(explain(error, {"first": "GPU:1"}))
        stage 'first' (GPU:1), layer 'block3', microbatch 5, forward: Out of range: 7
    """
    message = error.message or ""
    known = _NOT_FINITE.search(message)
    if known is not None:
        # TensorFlow escapes quotes and non-ASCII characters in printed text.
        text = known[1].encode().decode("unicode_escape").encode("latin-1").decode()
        return PipelineError(text)
    for node in _NODE.findall(message):
        stage = labelled("stage", node)
        if stage is not None:
            place = ", ".join(_place(node, stage, devices or {}))
            return PipelineError(f"{place}: {_reason(message)}")
    return None


def _place(node: str, stage: str, devices: Mapping[str, Any]) -> Iterator[str]:
    replica, where = labelled("replica", node), ""
    if stage in devices:
        home = Home.of(devices[stage])
        names = home.devices if replica is None else home.replica(int(replica))
        where = f" ({', '.join(names)})"
    yield f"stage {stage!r}{where}"
    layer = labelled("layer", node)
    if layer is not None:
        yield f"layer {layer!r}"
    action = _ACTION.search(node)
    if action is not None:
        yield f"microbatch {action[2]}"
        if action[3] is not None:
            yield f"slice {action[3]}"
    if replica is not None:
        yield f"replica {replica}"
    if action is not None and action[1] == "R":
        yield "recomputation"
        return
    forward = action[1] == "F" if action is not None else "/gradients/" not in node
    yield "forward" if forward else "backward"


def _reason(message: str) -> str:
    """Returns the first error's message on one line, without traceback and names of nodes."""
    lines: list[str] = []
    for line in message.split("\n\t [[", 1)[0].splitlines():
        if line.startswith("Traceback"):
            break
        # Indented lines are the traceback of the node's creation.
        if not _PREAMBLE.match(line) and (not line.startswith("  ") or _CODE.match(line)):
            lines.append(_CODE.sub("", line).strip())
    return " ".join(lines)
