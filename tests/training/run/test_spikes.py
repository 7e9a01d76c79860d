"""Which losses stand out."""

import math
import random

from pipemesh.training.run.spikes import Spikes


def told(losses):
    spikes = Spikes()
    return [step for step, loss in enumerate(losses) if spikes.add(loss)]


def test_a_spike_is_told_and_noise_is_not():
    rng = random.Random(0)
    # As training goes: down, in noise.
    losses = [3 + 5 * math.exp(-step / 80) + rng.gauss(0, 0.1) for step in range(1000)]
    assert told(losses) == []
    # While it falls steeply, distances from the mean are large: nothing is told too early.
    for step in (400, 999):
        spiked = list(losses)
        spiked[step] += 4
        assert told(spiked) == [step]


def test_a_loss_that_falls_is_no_spike():
    assert told([9.0] * 100 + [1.0] * 100) == []


def test_a_loss_that_stays_high_is_told_of_until_it_is_usual():
    found = told([2.0 + 0.01 * (step % 2) for step in range(200)] + [4.0] * 200)
    assert found[0] == 200
    assert found == list(range(200, 200 + len(found)))
    assert len(found) < 20


def test_noise_of_a_constant_is_no_spike():
    assert told([1.0] * 100 + [1.0001] + [1.0] * 100) == []
