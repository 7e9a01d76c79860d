"""Times each layer of a language model on this machine: every layer a stage, one device."""

from __future__ import annotations

import os
import platform
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from pipemesh.layers import PipeliningLayer, mesh_cluster  # isort: skip
import numpy as np
import tensorflow as tf
from absl import flags
from lingvo.core import py_utils, tshape

from models.one_billion_word.params import CONFIGURATIONS, layers_of
from pipemesh.layers import FeatureExtractionLayer, layer_costs
from pipemesh.layers.named import lowering_scope
from pipemesh.layers.partition_layers import layer_metas, named_layers
from pipemesh.lowering import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan.figures import Curve, Figures, LayerFigures, all_reduces
from pipemesh.recurrent import ActionClock
from pipemesh.schedule import Schedule

# A row of tokens a microbatch; two of them, so that no action is the first of its kind.
MICROBATCHES = 2


def measure(model: str) -> Figures:
    """The figures of a configuration, for one row a microbatch."""
    # lingvo reads its flags.
    flags.FLAGS.mark_as_parsed()
    py_utils.SetEagerMode(True)
    config = CONFIGURATIONS[model]()
    # All blocks are alike.
    number, config.NUM_LAYERS = config.NUM_LAYERS, 1
    layers = layers_of(config)
    length = config.SEQUENCE_LENGTH
    costs = layer_costs(layers, *[tshape.Shape([1, length])] * 5)
    metas = _metas(layers, length)
    seconds = _seconds(layers, length, config.VOCAB_SIZE)
    found = []
    for stage, (cost, meta) in enumerate(zip(costs, metas, strict=True)):
        sent = [n for (_, _, way), n in meta.communication.rows.items() if way == "forward"]
        calls, size = (sum(column) for column in zip(*sent, strict=True))
        found.append(
            LayerFigures(
                layers[stage].cls.__name__,
                {kind: _line(times[stage]) for kind, times in seconds.items()},
                int(cost.parameter_bytes),
                _line(cost.activation_bytes),
                _line(cost.boundary_bytes),
                shares={"": all_reduces(config.NUM_HEADS, _line(size), calls)},
            )
        )
    embedding, block, softmax = found
    return Figures(
        (embedding, *[block] * number, softmax),
        # What an action takes beside its layers is among what was measured.
        about=f"{model}, {platform.machine()}, {os.cpu_count()} cores as one device",
    )


def _line(value: float) -> Curve:
    return Curve(((1, value),))


def _metas(layers: list[Any], length: int) -> list[Any]:
    """What layers say of themselves where two devices share them.

    Of two, each sends as many bytes for a sum as it puts in.
    """
    rules = LayoutRules.from_text("heads:model;d_ff:model;vocab:model")
    lowering = PlacementLowering(Mesh.from_text("model:2"), rules, [""] * 2)
    with lowering_scope(lowering):
        return layer_metas(named_layers(layers), *[tshape.Shape([1, length])] * 5)


def _seconds(layers: list[Any], length: int, vocabulary: int) -> dict[str, tuple[float, ...]]:
    """Medians by kind of action, of the actions of one step after the first."""
    found: dict[str, tuple[float, ...]] = {}
    for kinds in ("B", "IW"):
        costs = _timeline(layers, length, vocabulary, kinds).costs.per_stage(len(layers))
        durations = costs.durations()
        found |= {kind: durations[kind] for kind in f"F{kinds}"}
    return found


def _timeline(layers: list[Any], length: int, vocabulary: int, kinds: str) -> Any:
    """A step in which every layer is a stage, all on one device."""
    last = len(layers) - 1
    row: list[str] = []
    for m in range(MICROBATCHES):
        row += [f"{s}F{m}" for s in range(last + 1)]
        row += [f"{s}{kind}{m}" for s in range(last, -1, -1) for kind in kinds]
    schedule = Schedule.from_text(f"0: {' '.join(row)}")
    stages = [
        FeatureExtractionLayer.Params().Set(name=f"stage_{n}", sub=[layer.Copy()])
        for n, layer in enumerate(named_layers(layers))
    ]
    with mesh_cluster(Mesh.from_text("layers:1")), py_utils.VariableStore():
        py_utils.GetOrCreateGlobalStepVar()
        stack = (
            PipeliningLayer.Params()
            .Set(
                name="stack",
                cell_tpl=stages,
                num_micro_batches=MICROBATCHES,
                schedule=schedule,
                loss_inside=True,
                remat="none",
                check_numerics="off",
            )
            .Instantiate()
        )
        stack.clock = clock = ActionClock()
        ids = np.random.default_rng(0).integers(vocabulary, size=(MICROBATCHES, length))
        tokens = tf.constant(ids, tf.int32)
        places = tf.tile(tf.range(length)[None], [MICROBATCHES, 1])
        given = (tokens, tokens, tf.ones(tokens.shape), tf.ones_like(tokens), places)
        variables = stack.vars.Flatten()

        @tf.function(autograph=False)
        def step():
            with tf.GradientTape() as tape:
                loss = stack.FPropDefaultTheta(*given)[0]
            return loss, tf.linalg.global_norm(tape.gradient(loss, variables))

        for _ in range(2):
            step()
        return clock.timeline(schedule)
