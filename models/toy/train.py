"""Trains two layers to be the identity, under any mesh and layout.

    python -m models.toy.train --mesh_shape=model:2 --layout=hidden:model

The loss curve does not depend on the mesh, the layout and the lowering.
"""

from __future__ import annotations

from pipemesh.commands.flags import FLAGS, Flag

from ..named_dims import command

TRAIN_FLAGS = (
    *command.shared_flags(batch_size=256, hidden_size=64, learning_rate=0.2, eval_every=50),
    Flag("io_size", int, 32, least=1, help="Numbers a vector."),
    Flag("steps", int, 200, least=1, help="Number of steps."),
    Flag("activation", default="none", choices=["none", "relu"], help="Of the hidden layer."),
)
SIZE_FLAGS = {"batch": "batch_size", "io": "io_size", "hidden": "hidden_size"}


def train() -> None:
    """Trains with the settings of the flags."""
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
    command.run(train, __doc__, TRAIN_FLAGS)
