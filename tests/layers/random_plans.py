"""Random plans of a small stack: training equals the plain stack's, or one line says why not.

A plan has a random mesh, layout, cut, schedule, number of microbatches, remat, lowering and
precision. The loss, all gradients and the weights after two steps are compared with those of the
same layers without a pipeline. Where they differ, the plain stack is run again from weights that
are changed by a unit of round-off, which shows how large a difference round-off explains. Run many
with

    python -m tests.layers.random_plans --plans=50 --seed=0

A seed that fails prints its plan; `--plans=1 --seed=<seed>` runs it again.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import traceback
from collections.abc import Sequence
from typing import Any

# First: it starts the devices.
from tests import conftest as conftest  # isort: skip

import numpy as np
import tensorflow as tf

from pipemesh.errors import PipemeshError
from pipemesh.layers.named import Attention
from pipemesh.lowering import ops
from pipemesh.schedule.names import NAMES
from tests.layers import test_precision as dense
from tests.layers.blocks import blocks
from tests.layers.harness import Result, joined, run_tf2
from tests.layers.pipeline import named_stacks as named
from tests.layers.stacks import first, plain_params, stack_of

STEPS = 2
# Those without slices of sequences, of which only some stacks can be given one.
SCHEDULES = [name for name, known in NAMES.items() if known.trains and known.num_slices == 1]
# Random layers may have sums of large terms that cancel, such as gradients of biases of keys.
CLOSE = {"rtol": 5e-4, "atol": 5e-5, "of_greatest": 1e-5}
# Adam makes an update of 0.05 of any gradient, also of one that is mostly round-off.
UPDATES = 5e-3
# Of the greatest gradient, where stages compute in bfloat16.
BFLOAT16 = 0.1
# A unit of round-off, relatively, in float32 and in bfloat16; how many runs of the plain stack show
# what it does; and how many times that a plan may differ, which rounds at each operation.
ROUND_OFF, TRIALS, AS_MUCH = {tf.float32: 2e-7, tf.bfloat16: 2.0**-9}, 4, 8
# Tokens of a row, which all axes divide.
LENGTH = 12
RNG = np.random.default_rng(7)
NAMED_INPUTS = [
    *(RNG.integers(0, named.VOCAB, [8, LENGTH]).astype(np.int32) for _ in range(2)),
    RNG.uniform(size=[8, LENGTH]).astype(np.float32),
    None,
]


class Attending(named.Masked):
    """A block whose tokens see others of their row, or of their segment."""

    takes_slices = True

    @classmethod
    def Params(cls):
        p = super().Params()
        attention = Attention.Params().Set(input_dim=named.WIDTH, num_heads=2, block_size=4)
        p.Define("attention_tpl", attention, "What it is.")
        p.Define("packed", False, "Whether labels say the segments.")
        return p

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("attention", self.params.attention_tpl)

    def FProp(self, theta, x, labels, weights, nothing):
        x = self.Named(x, "batch;length;embed")
        ids = None
        if self.params.packed:
            ids = ops.cast(ops.greater(self.Named(labels, "batch;length"), 4), tf.int32)
        x = x + self.attention.FProp(theta.attention, x, ids)
        return super().FProp(theta, x, labels, weights, nothing)


def attended(p, shape):
    """Returns what the attention of `Attending` counts."""
    return p.attention_tpl.cls.FPropMeta(p.attention_tpl, shape).flops


named.counts(Attending, 2 * 2 * named.WIDTH * 8, attended)


class Plan:
    """A random plan of a random stack.

    Args:
        seed: of all choices.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.seed = seed
        self.attention: dict[str, Any] | None = None
        self.is_named = draw.random() < 0.7
        places = draw.choice((1, 2, 2, 2, 3, 4))
        axes = [("layers", places), ("data", draw.choice((1, 1, 2)))]
        if self.is_named:
            axes.append(("model", draw.choice((1, 2))))
            axes.append(("cp", draw.choice((1, 1, 2, 3))))
        axes = [(name, size) for name, size in axes if name == "layers" or size > 1]
        while np.prod([size for _, size in axes]) > conftest.NUM_DEVICES:
            axes.pop()
        draw.shuffle(axes)
        rules = {}
        if self.is_named:
            names = [name for name, _ in axes if name != "layers"]
            for dim in ("vocab", "d_ff", "embed"):
                axis = draw.choice([None, *names])
                if axis is not None and (dim != "embed" or axis == "data"):
                    rules[dim] = axis
            attends = "cp" in names or draw.random() < 0.3
            self.block = self._attending(draw) if attends else named.Masked.Params()
            if "cp" in names:
                rules["length"] = "cp"
            if attends and "model" in names and draw.random() < 0.7:
                rules["heads"] = "model"
        mesh = ";".join(f"{name}:{size}" for name, size in axes)
        self.mesh = f"{mesh} {';'.join(f'{dim}:{axis}' for dim, axis in rules.items())}".strip()
        # Mostly what fits together; the rest is refused.
        is_simd = self.is_named and draw.random() < 0.25
        name = draw.choice(("gpipe", "looped_bfs") if is_simd else SCHEDULES)
        least = {"interleaved_one_f_one_b": places, "dual_pipe_v": 2 * places}.get(name, 1)
        most = 8 // dict(axes).get("data", 1)
        microbatches = [n for n in (1, 2, 4, 8) if n <= most and not n % least] or [1, 8]
        stages = places * NAMES[name].stages_a_device
        # The embedding and the head of a named stack are layers besides its blocks.
        more = 2 if self.is_named else 0
        self.num_blocks = draw.randint(max(2, stages - more), stages + 2)
        if is_simd:
            self.num_blocks = stages * draw.randint(1, 2)
        number = self.num_blocks + more
        cuts = sorted(draw.sample(range(1, number), stages - 1))
        if is_simd:
            cuts = [1 + i * self.num_blocks // stages for i in range(1, stages)]
        self.bounds = [0, *cuts, number]
        self.tied = named.TIED if self.is_named and draw.random() < 0.3 else {}
        self.options: dict[str, Any] = {
            "schedule": name,
            "num_micro_batches": draw.choice(microbatches),
            "remat": "full" if is_simd else draw.choice(("full", "none", "except_last", "twice")),
            "loop": None if is_simd else draw.choice((None, None, True, False)),
            "lowering": "simd" if is_simd else "placement",
            "loss_inside": True,
        }
        is_causal = self.attention is None or self.attention["causal"]
        if self.is_named and not is_simd and is_causal and "cp" not in names:
            if name == "one_f_one_b" or draw.random() < 0.3:
                if stages == places:
                    self.options["schedule"] = f"seq1f1b:{draw.choice((2, 3, 4, 6))}"
        # Weights of attention differ by more than can be told from a mistake.
        if self.attention is None and draw.random() < 0.2:
            self.options["fprop_dtype"] = tf.bfloat16
        if self.options["schedule"].startswith("seq1f1b:") and draw.random() < 0.5:
            self.options["schedule"] += ":equal_work"

    def __str__(self) -> str:
        kind = "named" if self.is_named else "dense"
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        tied = ", tied weights" if self.tied else ""
        attends = ""
        if self.attention is not None:
            packed = ", packed" if self.block.packed else ""
            attends = f", attention with {self.attention}{packed}"
        return (
            f"seed {self.seed}: {kind}, mesh '{self.mesh}', bounds {self.bounds}, {options}{tied}"
            f"{attends}"
        )

    def _attending(self, draw: random.Random) -> Any:
        """Returns params of a block with attention, and notes what they are."""
        causal = draw.random() < 0.7
        self.attention = {
            "causal": causal,
            "window": draw.choice((None, None, 5)),
            "relative_buckets": draw.choice((0, 0, 4)),
            "num_kv_heads": draw.choice((None, 1)),
            "use_rotary": draw.random() < 0.3,
        }
        block = Attending.Params().Set(packed=draw.random() < 0.4)
        # The gradient of a bias of keys is nothing but round-off, unless keys are rotated.
        block.attention_tpl.Set(**self.attention, use_bias=self.attention["use_rotary"])
        return block

    def _stack(self, bounds: Sequence[int], **options: Any) -> Any:
        if self.is_named:
            layers = named.language_layers(self.num_blocks, self.block)
            if self.attention is not None or "fprop_dtype" in self.options:
                # The norm of a token all of whose elements are dropped makes round-off enormous.
                layers[0].dropout_rate = 0.0
            return named.language(bounds, layers=layers, tied=self.tied, **options)
        layers = [*blocks(self.num_blocks - 1), dense.Head.Params().Set(name="head")]
        return stack_of(layers, bounds, **options)

    def _run(self, params: Any, **kwargs: Any) -> Result:
        inputs, loss = (NAMED_INPUTS, first) if self.is_named else ([dense.X, dense.X], dense.mean)
        return run_tf2(params, inputs, loss=loss, **kwargs)

    def _plain(self) -> Any:
        """Returns params of the stack without a pipeline."""
        dtype = self.options.get("fprop_dtype")
        if dtype is None:
            return plain_params(self._stack(self.bounds, **self.options))
        # Random numbers of plain TensorFlow depend on the dtype.
        options = {"loss_inside": True, "lowering": "placement", "num_micro_batches": 1}
        whole = [0, self.bounds[-1]]
        return self._stack(whole, pipelined=False, fprop_dtype=dtype, **options)

    def results(self) -> tuple[Result, Result]:
        """Returns the results under the plan, and those of the stack without a pipeline."""
        params = self._stack(self.bounds, **self.options)
        found = self._run(params, steps=STEPS, num_devices=self.mesh)
        return found, self._run(self._plain(), steps=STEPS)

    def explained(self, plain: Result) -> dict[str, float]:
        """Returns the difference of each gradient, by name, that round-off explains: `AS_MUCH` of
        the greatest one of an element when the weights of the plain stack change by a unit of it.
        """
        unit = ROUND_OFF[self.options.get("fprop_dtype", tf.float32)]
        most = dict.fromkeys(plain.grads, 0.0)
        for trial in range(TRIALS):
            rng = np.random.default_rng(trial)
            moved = self._run(
                self._plain(),
                shake=lambda weight, rng=rng: weight * (1 + unit * rng.normal(size=weight.shape)),
            )
            for name, grad in moved.grads.items():
                difference = np.abs(grad - plain.grads[name]).max()
                most[name] = max(most[name], AS_MUCH * float(difference))
        return most


def check(seed: int) -> tuple[str | None, str | None]:
    """Runs the plan of a seed.

    Returns:
        The problem, or None; and the line of the refusal, or None.
    """
    plan = Plan(seed)
    try:
        found, plain = plan.results()
    except PipemeshError as error:
        line = str(error)
        wrong = "\n" in line or len(line) > 600
        return (f"{plan}\nno single line: {line}" if wrong else None), line
    except Exception as error:
        return "\n".join([str(plan), *traceback.format_exception(error, limit=-8)]), None
    try:
        _assert_equal(plan, found, plain)
    except AssertionError:
        explained = plan.explained(plain)
        try:
            _assert_equal(plan, found, plain, explained)
        except AssertionError as error:
            return f"{plan}\n{error}", None
        print(f"{plan}\n  differs as the plain stack does by round-off", flush=True)
    return None, None


def _assert_equal(
    plan: Plan, found: Result, plain: Result, explained: dict[str, float] | None = None
) -> None:
    """Compares results; `explained`: of each gradient, what round-off explains."""
    if "fprop_dtype" in plan.options:
        np.testing.assert_allclose(found.outputs[0], plain.outputs[0], rtol=BFLOAT16)
        for name, wanted in plain.grads.items():
            if name in found.grads:
                close = max(BFLOAT16 * np.abs(wanted).max(), (explained or {}).get(name, 0.0))
                np.testing.assert_allclose(found.grads[name], wanted, 0, close, err_msg=name)
        return
    if plan.attention is None and explained is None:
        found.assert_close(plain, **CLOSE)
        return
    without = [dataclasses.replace(each, weights={}) for each in (found, plain)]
    without[0].assert_close(without[1], own=explained, **CLOSE)
    if explained is not None:
        # Adam makes an update of any gradient, also of one that is mostly round-off.
        return
    weights = joined(found.weights, found.slices)
    assert weights.keys() == plain.weights.keys()
    for name, wanted in plain.weights.items():
        np.testing.assert_allclose(weights[name], wanted, 0, UPDATES, err_msg=name)


def main(args: Sequence[str] | None = None) -> int:
    """Runs plans; returns the number of those that fail."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plans", type=int, default=20, help="number of plans")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first plan")
    given = parser.parse_args(args)
    failed = refused = 0
    for seed in range(given.seed, given.seed + given.plans):
        wrong, refusal = check(seed)
        if wrong is not None:
            failed += 1
            print(wrong, flush=True)
        elif refusal is not None:
            refused += 1
            print(f"{Plan(seed)}\n  refused: {refusal}", flush=True)
    agree = given.plans - failed - refused
    print(f"{agree} plans of {given.plans} equal the plain stack, {refused} are refused in a line")
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
