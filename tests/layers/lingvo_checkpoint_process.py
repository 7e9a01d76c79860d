"""Trains with `lingvo.core.gpipe`, saves, trains on: what a checkpoint of lingvo's must go on to.

Arguments: a folder, and `automatic` or `by_hand` stages. Prints the losses after saving.
"""

import json
import sys

import tensorflow as tf
from absl import flags

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip
from lingvo.core import gpipe, layers, py_utils, tshape

BATCH, WIDTH, NUM_STEPS = 8, 4, 3


def inputs():
    return tf.reshape(tf.sin(tf.range(BATCH * WIDTH, dtype=tf.float32)), [BATCH, WIDTH])


def dense(name=""):
    return layers.FCLayer.Params().Set(
        name=name, input_dim=WIDTH, output_dim=WIDTH, activation="TANH"
    )


def by_hand(stage_params, boundaries=(2, 4)):
    """Stages with layers of one name in two of them."""
    begin, stages = 0, []
    subs = [dense(name) for name in ("first", "block", "block", "last")]
    for number, end in enumerate(boundaries):
        stages.append(stage_params().Set(name=f"stage{number}", sub=subs[begin:end]))
        begin = end
    return stages


def automatic(partition, num_stages):
    return partition([dense() for _ in range(4)], num_stages, tshape.Shape([BATCH, WIDTH]))


def stack(pipelining_params, stages):
    return pipelining_params().Set(name="stack", num_micro_batches=2, cell_tpl=stages)


def loss_and_step(layer, step):
    """The loss and the operation that trains with Adam."""
    loss = tf.reduce_sum(tf.square(layer.FPropDefaultTheta(inputs()) - 0.5))
    optimizer = tf.compat.v1.train.AdamOptimizer(0.05)
    return loss, optimizer.minimize(loss, step, var_list=layer.vars.Flatten())


def train(session, loss, train_step):
    return [float(session.run([loss, train_step])[0]) for _ in range(NUM_STEPS)]


def main():
    folder, kind = sys.argv[1:]
    flags.FLAGS.mark_as_parsed()
    py_utils.SetEagerMode(False)
    with tf.Graph().as_default():
        tf.compat.v1.set_random_seed(3)
        step = py_utils.GetOrCreateGlobalStepVar()
        if kind == "automatic":
            stages = automatic(gpipe.PartitionSequentialLayers, 2)
        else:
            stages = by_hand(gpipe.FeatureExtractionLayer.Params)
        layer = stack(gpipe.PipeliningLayer.Params, stages).Instantiate()
        loss, train_step = loss_and_step(layer, step)
        saver = tf.compat.v1.train.Saver()
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            train(session, loss, train_step)
            path = saver.save(session, folder + "/ckpt", global_step=step)
            losses = train(session, loss, train_step)
    print(json.dumps({"path": path, "losses": losses}))


if __name__ == "__main__":
    main()
