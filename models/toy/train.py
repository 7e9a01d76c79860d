"""Trains two layers to be the identity, under any mesh and layout.

    python -m models.toy.train --mesh_shape=model:2 --layout=hidden:model

The loss curve does not depend on the mesh, the layout and the lowering.
"""

from __future__ import annotations

from absl import flags

from ..named_dims import command

FLAGS = flags.FLAGS

command.define_flags(batch_size=256, hidden_size=64, learning_rate=0.2, eval_every=50)
flags.DEFINE_integer("io_size", 32, "Numbers a vector.", lower_bound=1)
flags.DEFINE_integer("steps", 200, "How many steps.", lower_bound=1)
flags.DEFINE_enum("activation", "none", ["none", "relu"], "Of the hidden layer.")

SIZE_FLAGS = {"batch": "batch_size", "io": "io_size", "hidden": "hidden_size"}


def train() -> None:
    """Trains as the flags say."""
    from .network import ToyNetwork, batches

    network = ToyNetwork(
        FLAGS.batch_size, FLAGS.io_size, FLAGS.hidden_size, FLAGS.activation, FLAGS.seed
    )
    trainer = command.make_trainer(network, SIZE_FLAGS)
    (held_out,) = next(batches(FLAGS.batch_size, FLAGS.io_size, FLAGS.seed + 1))

    def evaluate() -> str:
        return f"held-out mean squared error {trainer.forward([held_out])[0]:.3g}"

    command.train(
        trainer, batches(FLAGS.batch_size, FLAGS.io_size, FLAGS.seed), FLAGS.steps, evaluate
    )


if __name__ == "__main__":
    command.run(train)
