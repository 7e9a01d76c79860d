"""What a recurrent layer keeps of a chunk of time for its backward pass."""

import pytest
import tensorflow as tf

from pipemesh.backend.structure import Structure
from pipemesh.randomness.scope import WholeDraws
from pipemesh.recurrent.passes.cuts import Cuts
from pipemesh.recurrent.passes.cutting import Cutting
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.recurrent.time.layer_stage import LayerArguments, LayerStage

CHUNK, WIDTH = 5, 3
INPUTS, STATES, STATE = (CHUNK, WIDTH), "states over time", (WIDTH,)


def reads(theta, state, inputs):
    return {"m": tf.tanh(theta["w"] * inputs["x"] + state["m"])}, ()


def does_not_read(theta, state, inputs):
    return {"m": tf.tanh(theta["w"] * inputs["x"])}, ()


@pytest.mark.parametrize(
    ("cell", "unused_state", "recomputes", "want"),
    [
        (reads, False, False, {INPUTS, STATE, STATES}),
        (reads, False, True, {INPUTS, STATE}),
        (does_not_read, True, False, {INPUTS, STATE}),
    ],
)
def test_a_chunk_keeps_its_inputs_and_the_states_that_are_read(
    cell, unused_state, recomputes, want
):
    with tf.Graph().as_default():
        given = {"x": tf.zeros([WIDTH])}
        arguments = LayerArguments(
            number=0,
            device="CPU:0",
            cell_fn=cell,
            cell_grad=None,
            cell_out=lambda state: {"x": state["m"]},
            cell_out_grad=None,
            theta={"w": tf.ones([])},
            state0={"m": tf.zeros([WIDTH])},
            accumulator_layer=None,
        )
        layer = LayerStage(
            arguments, Structure(given, "inputs"), [tf.TensorSpec([WIDTH])], unused_state
        )
        traced = TracedStage(
            layer.stage([tf.constant(0), tf.constant(10)], CHUNK),
            [tf.TensorSpec([CHUNK, WIDTH])],
            Cutting(2, CHUNK, 0),
            False,
            lambda: WholeDraws({}, lambda name, dim, folded: 1),
        )
        traced.differentiate(range(len(traced.outputs)))
        kept = Cuts(traced, lambda node: recomputes).kept
        # Scalars that say which time steps were computed do not count.
        large = {
            STATES if spec.dtype == tf.variant else tuple(spec.shape)
            for spec in map(traced.spec, kept)
            if spec.dtype != tf.int32
        }
    assert large == want
