"""Steps on GPUs are those on CPUs; without GPUs the same code runs on CPUs alone."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.peak import TensorMemory, peak_flops
from pipemesh.checkpoint import Checkpoints, restore
from pipemesh.plan import Plan
from pipemesh.randomness import layer_scope, plan_free_randomness
from pipemesh.recurrent import ActionClock, Options, Stage, pipeline_loss
from pipemesh.recurrent.forecast import memory_of
from pipemesh.schedule import one_f_one_b
from pipemesh.training.trained_task import TrainedTask
from tests.devices import KIND, device_name
from tests.models.one_billion_word.language_model import pipelined, random_batch, small

pytestmark = pytest.mark.gpu

# Round-off of sums in another order, after some steps of an optimizer.
CLOSE = {"rtol": 2e-4, "atol": 2e-5}
WHOLE = Plan("layers:2", num_microbatches=4)
PLANS = {
    "1f1b": WHOLE,
    "zb_h1": Plan("layers:2", schedule="zb_h1", num_microbatches=4, remat="none"),
    "zb_v": Plan("layers:2", schedule="zb_v", num_microbatches=4),
    "two stages a device": Plan("layers:2", schedule="interleaved:2", num_microbatches=4),
    "slices": Plan("layers:2", schedule="seq1f1b:2", num_microbatches=4),
    "full remat": Plan("layers:2", num_microbatches=4, remat="full"),
    "replicas": Plan("layers:2;data:2", "batch:data", num_microbatches=2),
    "cut weights": Plan("layers:2;data:2", "batch:data;embed:data", num_microbatches=2),
    "model": Plan("layers:2;model:2", "heads:model;d_ff:model;vocab:model", num_microbatches=2),
    "cp": Plan("layers:2;cp:2", "length:cp", num_microbatches=2),
    "one program": Plan(
        "layers:2;data:2", "batch:data", "gpipe", num_microbatches=2, remat="full", lowering="simd"
    ),
}


class Run:
    """A language model with dropout, trained on some kind of devices; all share lingvo's step."""

    def __init__(self, plan, kind=KIND, **settings):
        self.plan = plan
        settings = {"LAYERS": "named", "STRICT_DEVICES": plan.lowering == "placement"} | settings
        params = pipelined(small(**settings, PLAN=plan)).Set(random_seed=3)
        self.task = TrainedTask(params, plan, kind, 3)

        @tf.function(autograph=False)
        def step(batch):
            return self.task.train(batch, lambda metrics, per_example: ())[:3]

        self._step = step

    def train(self, *seeds):
        """The losses and norms of gradients of steps."""
        with self.task.cluster():
            found = [self._step(random_batch(seed)) for seed in seeds]
        return [float(value) for loss, _, norm in found for value in (loss, norm)]

    def weights(self):
        state = self.task.state()
        return {name: np.array(tf.convert_to_tensor(state[name])) for name in self.task.weights()}


@functools.cache
def on_a_cpu(num_microbatches):
    return Run(Plan("layers:1", num_microbatches=num_microbatches), "CPU").train(0, 1)


# On CPUs other tests compare plans, and resume them, at length.
OFTEN = ("1f1b",) if KIND == "CPU" else PLANS
ON_GPUS = pytest.mark.exhaustive if KIND == "CPU" else pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.exhaustive) for name in PLANS],
)
def test_losses_and_norms_equal_those_of_a_cpu(name, eagerly):
    plan = PLANS[name]
    found = Run(plan).train(0, 1)
    np.testing.assert_allclose(found, on_a_cpu(plan.num_microbatches), **CLOSE)


@pytest.mark.slow
def test_steps_in_half_precision_are_near_those_in_float32(eagerly):
    plan = Plan("layers:2", num_microbatches=4, compute_dtype="bfloat16")
    np.testing.assert_allclose(Run(plan).train(0, 1), on_a_cpu(4), rtol=3e-2)


@ON_GPUS
def test_a_checkpoint_goes_on_on_devices_of_another_kind(tmp_path, eagerly):
    here, there = Run(WHOLE), Run(Plan("layers:1", num_microbatches=4), "CPU")
    here.train(0)
    for seed, (one, other) in enumerate([(here, there), (there, here)], 1):
        path = Checkpoints(str(tmp_path), one.task.state()).save(seed, {})
        wanted = one.train(seed)
        restore(path, other.task.state())
        np.testing.assert_allclose(other.train(seed), wanted, **CLOSE)


@ON_GPUS
def test_a_step_that_is_repeated_is_the_same_bit_for_bit(eagerly):
    first = Run(WHOLE)
    losses, wanted = first.train(0, 1), first.weights()
    again = Run(WHOLE)
    assert again.train(0, 1) == losses
    for name, value in again.weights().items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)


DRAWS = {
    "uniform": lambda: tf.random.uniform([4, 100]),
    "normal": lambda: tf.random.normal([4, 100]),
    "dropout": lambda: tf.nn.dropout(tf.ones([4, 100]), 0.3),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_do_not_depend_on_the_device(name):
    def drawn(device):
        @tf.function(autograph=False)
        def draw():
            step = tf.constant(7, tf.int64)
            with tf.device(device), plan_free_randomness(step), layer_scope("layer"):
                return DRAWS[name]()

        return draw()

    # The bits are the same; sines and logarithms may end in another.
    np.testing.assert_allclose(drawn(device_name(1)), drawn("CPU:0"), rtol=1e-5, atol=1e-6)


WIDTH, ROWS = 1024, 256


def products(**options):
    """A step of two stages of a large product each, on two devices."""

    def forward(theta, carry, inputs, microbatch, step):
        return [tf.nn.tanh(tf.matmul(inputs[0], theta[0]))], []

    def last(theta, carry, inputs, microbatch, step):
        (y,), _ = forward(theta, carry, inputs, microbatch, step)
        return [tf.reduce_sum(y)], []

    variables = []
    for number in range(2):
        with tf.device(device_name(number)):
            variables.append(tf.Variable(tf.ones([WIDTH, WIDTH]) / WIDTH))
    with tf.device(device_name(0)):
        x = tf.ones([4 * ROWS, WIDTH])

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            stages = [
                Stage(f"s{i}", function, [tf.convert_to_tensor(variables[i])], [], device_name(i))
                for i, function in enumerate((forward, last))
            ]
            loss, _, _ = pipeline_loss(stages, [x], SCHEDULE, options=Options(**options))
        return loss, tape.gradient(loss, variables)

    return step


SCHEDULE = one_f_one_b(2, 4)


@pytest.mark.xfail(KIND == "GPU", reason="clocks see launches of kernels", strict=True)
def test_a_clock_sees_when_products_end(eagerly):
    clock = ActionClock()
    step = products(clock=clock, loop=False, remat="none")
    for _ in range(3):
        step()
    least = 2 * ROWS * WIDTH**2 / peak_flops([device_name(0)])
    durations = clock.durations()
    assert len(durations) == 16
    # What all cores do for one product, they do for two at once.
    assert min(durations.values()) > 0.5 * least


def test_memory_is_what_the_allocator_gives_out(eagerly):
    """Of two devices, each with an allocator of its own, or of both together."""
    memory = [TensorMemory(device_name(number)) for number in range(2)][: 1 if KIND == "CPU" else 2]
    if not memory[0].is_counted:
        pytest.skip("this build of TensorFlow does not count the memory of these devices")
    found = []
    step = products(remat="none", loop=False, noted_run=lambda run: found.extend(memory_of(run)))
    step()
    held = [each.current for each in memory]
    for each in memory:
        each.forget_peak()
    step()
    needed = [each.peak - before for each, before in zip(memory, held, strict=True)]
    # Beside what is kept: gradients, and what an action computes with.
    kept = [each.kept for each in found]
    kept = [sum(kept)] if KIND == "CPU" else kept
    for measured, forecast in zip(needed, kept, strict=True):
        assert forecast <= 1.02 * measured and measured <= forecast + 6 * 4 * WIDTH**2
