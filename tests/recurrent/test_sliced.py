"""A pipeline whose microbatches are cut into slices of sequences equals the plain model."""

import functools

import pytest

from pipemesh.recurrent import Selective
from pipemesh.schedule import (
    gpipe,
    interleaved_one_f_one_b,
    recompute,
    seq_one_f_one_b,
    zb_h1,
    zb_v,
)
from tests.recurrent import sliced

PICKED = Selective(lambda layer: layer in ("layer1", "layer2"))
CASES = {
    "unrolled": (seq_one_f_one_b(2, 2, 2), {"remat": "none", "rolled": False}),
    "loops": (seq_one_f_one_b(2, 4, 4), {"remat": "full", "rolled": True}),
    "ticks": (seq_one_f_one_b(4, 2, 4), {"remat": "except_last", "rolled": "ticks"}),
    "one microbatch": (seq_one_f_one_b(2, 1, 4), {"remat": "full"}),
    "gpipe": (sliced.sliced(gpipe(2, 4), 2), {"remat": PICKED, "rolled": True}),
    "halves": (sliced.sliced(zb_h1(2, 4), 4), {"remat": "twice", "rolled": "ticks"}),
    "halves in loops": (sliced.sliced(zb_h1(2, 8), 2), {"remat": "none", "rolled": True}),
    "V": (sliced.sliced(zb_v(2, 2), 2), {"remat": "full", "rolled": False}),
    "two stages a device": (
        sliced.sliced(interleaved_one_f_one_b(2, 4, 2), 2),
        {"remat": "none", "rolled": "ticks"},
    ),
    "recomputed": (recompute(seq_one_f_one_b(2, 2, 4)), {"remat": "none", "rolled": True}),
    "recomputed in ticks": (recompute(seq_one_f_one_b(2, 2, 4)), {"rolled": "ticks"}),
}


@functools.cache
def wanted():
    return sliced.with_gradients(
        lambda *args: sliced.plain(*args)[:3], sliced.X, sliced.LABELS, sliced.SCALES
    )


@functools.cache
def wanted_outputs():
    def build(weights, x):
        return sliced.plain(weights, x, sliced.LABELS, sliced.SCALES)[3:]

    return sliced.with_gradients(build, sliced.X)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_those_of_whole_sequences(name):
    schedule, options = CASES[name]

    def build(*args):
        return sliced.pipelined(*args, schedule, **options)

    got = sliced.with_gradients(build, sliced.X, sliced.LABELS, sliced.SCALES)
    sliced.assert_same(got, wanted())


@pytest.mark.parametrize("rolled", [False, True, "ticks"])
def test_outputs_with_the_loss_outside_equal_those_of_whole_sequences(rolled):
    schedule = sliced.sliced(gpipe(2, 4), 4)
    got = sliced.with_gradients(
        lambda *args: sliced.pipelined_outputs(*args, schedule, rolled=rolled), sliced.X
    )
    sliced.assert_same(got, wanted_outputs())
