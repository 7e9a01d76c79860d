"""Trains a U-Net to find spheres and tubes in noisy volumes, under any mesh and layout.

    python -m models.unet.train --mesh_shape='y:2;x:2' --layout='rows:y;cols:x'

The loss curve does not depend on the mesh, the layout and the lowering.
"""

from __future__ import annotations

import itertools

from pipemesh.commands.flags import FLAGS, Flag
from pipemesh.errors import PipemeshError

from ..named_dims import command

TRAIN_FLAGS = (
    *command.shared_flags(
        batch_size=4,
        hidden_size=8,
        learning_rate=0.3,
        eval_every=25,
        hidden="Channels of the first level; each further level has twice as many.",
    ),
    Flag("steps", int, 200, least=1, help="Number of steps."),
    Flag(
        "side", int, 16, least=1, help="Voxels of a volume along each dim; each level halves them."
    ),
    Flag("levels", int, 2, least=0, help="How often the space is halved."),
)
SIZE_FLAGS = {
    "batch": "batch_size",
    "channels": "hidden_size",
    "features": "hidden_size",
    **dict.fromkeys(("depth", "rows", "cols"), "side, halved by each of --levels,"),
}
# Held-out volumes of an evaluation.
_HELD_OUT = 16


def train() -> None:
    """Trains with the settings of the flags."""
    import numpy as np

    from . import volumes
    from .network import UNet

    if FLAGS.side % 2**FLAGS.levels:
        raise PipemeshError(
            f"--side={FLAGS.side} cannot be halved --levels={FLAGS.levels} times; give a multiple "
            f"of {2**FLAGS.levels}"
        )
    network = UNet(FLAGS.batch_size, FLAGS.side, FLAGS.hidden_size, FLAGS.levels, FLAGS.seed)
    trainer = command.make_trainer(network, SIZE_FLAGS)
    number = -(-_HELD_OUT // FLAGS.batch_size)
    endless = volumes.batches(FLAGS.batch_size, FLAGS.side, FLAGS.seed, held_out=True)
    held_out = list(itertools.islice(endless, number))

    def evaluate() -> str:
        found = [trainer.forward(batch)[1].argmax(-1) for batch in held_out]
        scores = volumes.dice(np.stack(found), np.stack([classes for _, classes in held_out]))
        parts = zip(volumes.CLASSES[1:], scores, strict=True)
        return "held-out Dice score " + ", ".join(f"{name} {score:.3f}" for name, score in parts)

    command.train(
        trainer, volumes.batches(FLAGS.batch_size, FLAGS.side, FLAGS.seed), FLAGS.steps, evaluate
    )


if __name__ == "__main__":
    command.run(train, __doc__, TRAIN_FLAGS)
