"""Trains the MNIST network on scikit-learn's digits under any mesh and layout.

    python -m models.mnist.train --mesh_shape='data:2;model:2' --layout='batch:data;hidden:model'

The loss curve does not depend on the mesh, the layout and the lowering.
"""

from __future__ import annotations

import math

from pipemesh.commands.flags import FLAGS, Flag
from pipemesh.errors import PipemeshError

from ..named_dims import command

TRAIN_FLAGS = (
    *command.shared_flags(batch_size=128, hidden_size=1024, learning_rate=0.1, eval_every=25),
    Flag("steps", int, least=1, help="Number of steps; default: as --epochs says."),
    Flag("epochs", float, 20.0, help="How often all digits are seen."),
)
SIZE_FLAGS = {"batch": "batch_size", "hidden": "hidden_size"}


def train() -> None:
    """Trains with the settings of the flags."""
    from .digits import load_digits
    from .network import MnistNetwork

    if FLAGS.steps is not None and FLAGS.is_given("epochs"):
        raise PipemeshError(
            f"--steps={FLAGS.steps} and --epochs={FLAGS.epochs} both say how long to train; give "
            "one of them"
        )
    if not (math.isfinite(FLAGS.epochs) and FLAGS.epochs > 0):
        raise PipemeshError(f"--epochs={FLAGS.epochs}: it must be above 0")
    digits, held_out = load_digits()
    steps = FLAGS.steps or math.ceil(FLAGS.epochs * len(digits) / FLAGS.batch_size)
    network = MnistNetwork(FLAGS.batch_size, FLAGS.hidden_size, FLAGS.seed)
    trainer = command.make_trainer(network, SIZE_FLAGS)

    def evaluate() -> str:
        right = 0
        for images, labels, count in held_out.in_order(FLAGS.batch_size):
            _, logits = trainer.forward([images, labels])
            right += int((logits.argmax(-1) == labels)[:count].sum())
        return f"held-out accuracy {right / len(held_out):.1%}"

    command.train(trainer, digits.batches(FLAGS.batch_size, FLAGS.seed), steps, evaluate)


if __name__ == "__main__":
    command.run(train, __doc__, TRAIN_FLAGS)
