"""What does not fit a pipeline is said before it is built."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.recurrent import Home, Stage
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.recurrent.table.validation import (
    check_descending,
    check_joined,
    check_phases,
    cutting_of,
    microbatch_size,
    num_replicas,
)
from pipemesh.schedule import (
    Action,
    Schedule,
    forward_only,
    gpipe,
    one_f_one_b,
    seq_one_f_one_b,
)
from tests.recurrent.passes.traced import ROWS, WIDTH, cutting, traced_stage


def refused(text):
    return pytest.raises(PipelineError, match=text) if text else contextlib.nullcontext()


def tensors(*shapes):
    return [tf.TensorSpec(shape) for shape in shapes]


def test_a_microbatch_is_an_equal_part_of_the_batch():
    inputs = tensors([12, 3], [12])
    assert microbatch_size(inputs, 4, 0) == 3
    assert microbatch_size(inputs, 2, 0, replicas=3) == 6
    assert microbatch_size(tensors([5, 8]), 4, 1) == 2


@pytest.mark.parametrize(
    ("shapes", "arguments", "text"),
    [
        ([], (1, 0), "was given no tensor; it needs at least one"),
        ([[None, 3]], (2, 0), r"input 0 has shape \(None, 3\); a pipeline needs static shapes"),
        ([[4, 4], [4]], (2, 1), r"input 1 has shape \(4,\) and no dim 1 \(batch_dim\)"),
        ([[4], [8]], (2, 0), r"batch sizes 4 \(input 0\), 8 \(input 1\) in dim 0"),
        ([[6]], (4, 0), "6 does not divide into 4 .* num_micro_batches may be 1, 2, 3, 6"),
        ([[8]], (2, 0, None, 3), r"8 does not divide among the 3 replicas; use a multiple of 6"),
        ([[4], [8]], (2, 0, ["ids", "labels"]), r"4 \(ids\), 8 \(labels\)"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_an_error(shapes, arguments, text):
    with pytest.raises(PipelineError, match=text):
        microbatch_size(tensors(*shapes), *arguments)


def stage_on(name, home, recurrent=False):
    return Stage(name, None, [], [], home, recurrent)


def test_all_stages_have_as_many_replicas_and_stages_of_one_row_devices():
    two, wide = ("CPU:0", "CPU:1"), Home(("CPU:0", "CPU:1"), 1)
    assert num_replicas([stage_on("a", "CPU:0"), stage_on("b", "CPU:0", True)], [0, 0]) == 1
    assert num_replicas([stage_on("a", two), stage_on("b", two)], [0, 1]) == 2
    assert num_replicas([stage_on("a", wide), stage_on("b", "CPU:2")], [0, 1]) == 1
    text = r"'a' has 2 replicas \(CPU:0, CPU:1\), but stage 'b' has 1 \(CPU:2\)"
    with refused(text):
        num_replicas([stage_on("a", two), stage_on("b", "CPU:2")], [0, 1])
    with refused(r"'b' is recurrent and has 2 replicas .*give it one"):
        num_replicas([stage_on("a", two), stage_on("b", two, True)], [0, 1])
    with refused(r"'a' has 2 devices .*'b' has 1 .*one row of the"):
        num_replicas([stage_on("a", wide), stage_on("b", "CPU:2")], [0, 0])


def joined(output, *, shape=(ROWS, WIDTH), recurrent=False):
    """Checks a last stage of one output."""

    def forward(theta, carry, inputs, microbatch, step):
        return [output(inputs[0])], carry

    with tf.Graph().as_default():
        traced = traced_stage(forward, inputs=[np.ones(shape, np.float32)], recurrent=recurrent)
        check_joined(traced, cutting(), True)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (lambda x: x * 2, None),
        (lambda x: tf.reduce_sum(x, 1), None),
        (tf.reduce_sum, None),
        (lambda x: tf.transpose(tf.transpose(x)), None),
        (lambda x: tf.reduce_sum(x, 0), r"output 0 of the last stage \('s'\) has shape \(3,\)"),
        (lambda x: tf.boolean_mask(x, x[:, 0] > 0), "its size in dim 0 .* tf.ensure_shape"),
        (lambda x: tf.ones([ROWS]), r"has shape \(2,\) and for the whole batch \(2,\)"),
    ],
)
def test_outputs_that_are_cut_along_the_batch_are_joined(output, text):
    with refused(text):
        joined(output)
    if text is None:
        # A dim that is as large as a microbatch.
        joined(output, shape=(ROWS, ROWS))


def test_a_size_that_fits_by_chance_does_not_fit_the_whole_batch():
    text = r"has shape \(2,\) and for the whole batch \(2,\)"
    with pytest.raises(PipelineError, match=text):
        joined(lambda x: tf.reduce_sum(x, 0), shape=(ROWS, ROWS))
    # The outputs of recurrent stages are along time.
    joined(lambda x: tf.reduce_sum(x, 0), recurrent=True)


def table(*actions):
    return Schedule((tuple(map(Action.from_text, actions)),), (0,), 2)


def test_sequences_are_cut_into_slices():
    inputs, schedule = tensors([8, 6, 2], [8], [8, 6]), seq_one_f_one_b(2, 2, 3)
    assert cutting_of(inputs, schedule, 0, 1, 2) == Cutting(2, 4, 0, 2, 3, 2, 1)
    assert cutting_of(inputs, one_f_one_b(2, 2), 0, 1, 1) == Cutting(2, 4, 0)
    time_first = tensors([6, 8], [6, 8, 2])
    assert cutting_of(time_first, schedule, 1, 0, 1) == Cutting(2, 4, 1, 1, 3, 2, 0)


@pytest.mark.parametrize(
    ("shapes", "dim", "text"),
    [
        ([[8, 6]], 0, r"sequence_dim is 0; give a dim .* not the batch's, which is 0"),
        ([[8, 6]], 2, r"have no dim 2 \(sequence_dim\).* one has to have it"),
        ([[8, 6], [8, 3]], 1, r"lengths 3 \(input 1\), 6 \(input 0\) in dim 1"),
        ([[8, 4]], 1, r"into 3 slices, and sequences of 4 positions .* 1, 2, 4 slices"),
    ],
)
def test_sequences_that_cannot_be_cut_are_errors(shapes, dim, text):
    with pytest.raises(PipelineError, match=text):
        cutting_of(tensors(*shapes), seq_one_f_one_b(2, 2, 3), 0, dim, 1)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (lambda x: x, None),
        (tf.reduce_sum, None),
        (lambda x: x[:, 0, 0], r"has shape \(2,\) and no dim 1 .* along which slices"),
        (lambda x: tf.tile(x, [1, 2, 1]), r"slices have 3 positions in dim 1 .* once for each pos"),
        (lambda x: tf.reduce_sum(x, 1), r"\(2, 3\) and for the whole sequence \(2, 3\)"),
    ],
)
def test_outputs_of_slices_are_joined(output, text):
    cutting = Cutting(1, ROWS, 0, 1, 2, WIDTH, 1)

    def forward(theta, carry, inputs, microbatch, step):
        return [output(inputs[0])], carry

    with tf.Graph().as_default():
        stage = Stage("s", forward, [], [], "CPU:0")
        specs = [tf.TensorSpec([ROWS, WIDTH, WIDTH])]
        traced = TracedStage(stage, specs, cutting, True, lambda: None)
        traced.differentiate([])
        with refused(text):
            check_joined(traced, cutting, True)


def test_with_the_loss_outside_forward_comes_first():
    check_phases(gpipe(2, 3))
    check_phases(forward_only(2, 3))
    with pytest.raises(ScheduleError, match="device 0, tick 3: 0F2 follows a backward action"):
        check_phases(one_f_one_b(2, 4))
    with pytest.raises(ScheduleError, match="device 0, tick 2: 0F1"):
        check_phases(table("0F0", "0B0", "0F1", "0B1"))


def test_recurrent_stages_go_up_and_down():
    check_descending(gpipe(2, 3))
    check_descending(forward_only(2, 3))
    check_descending(table("0F0", "0F1", "0I1", "0I0", "0W0", "0W1"))
    with pytest.raises(ScheduleError, match="device 0, tick 1: 0F0 follows microbatch 1"):
        check_descending(table("0F1", "0F0", "0B1", "0B0"))
    with pytest.raises(ScheduleError, match=r"tick 3: 0B1 follows microbatch 0; .* as in gpipe"):
        check_descending(table("0F0", "0F1", "0B0", "0B1"))


def test_recurrent_stages_take_slices_of_a_microbatch_in_turn():
    check_descending(seq_one_f_one_b(3, 4, 3))
    # Microbatches in any order.
    check_descending(Schedule.from_text("0F1.0 0F1.1 0F0.0 0F0.1 0B1.1 0B1.0 0B0.1 0B0.0"))
    text = r"tick 1: 0F1.0 follows slice 0.0 of the same stage; .* as in seq_one_f_one_b"
    with pytest.raises(ScheduleError, match=text):
        check_descending(Schedule.from_text("0F0.0 0F1.0 0F0.1 0F1.1"))
    with pytest.raises(ScheduleError, match=r"tick 5: 0I1.1 follows slice 0.1"):
        check_descending(Schedule.from_text("0F0.0 0F0.1 0F1.0 0F1.1 0I0.1 0I1.1 0I0.0 0I1.0"))
