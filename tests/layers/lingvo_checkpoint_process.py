"""Trains with `lingvo.core.gpipe`, saves, trains on: what a checkpoint of lingvo's must go on to.

Arguments: a new folder and jobs such as `automatic:2:`, of the kind of stages and their number.
Behind the second colon there may be the path of a checkpoint to go on from, before anything is
trained. Prints a line of JSON a job: the path of what lingvo's own saver has written, and later
losses.
"""

import json
import os
import sys

import tensorflow as tf
from absl import flags

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip
from lingvo.core import gpipe, layers, py_utils, saver, tshape

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
    """The loss and the operation that trains with Adam, and averages weights."""
    loss = tf.reduce_sum(tf.square(layer.FPropDefaultTheta(inputs()) - 0.5))
    optimizer = tf.compat.v1.train.AdamOptimizer(0.05)
    weights = layer.vars.Flatten()
    train_step = optimizer.minimize(loss, step, var_list=weights)
    with tf.control_dependencies([train_step]):
        return loss, tf.compat.v1.train.ExponentialMovingAverage(0.9).apply(weights)


def train(session, loss, train_step):
    return [float(session.run([loss, train_step])[0]) for _ in range(NUM_STEPS)]


def stages_of(kind, number):
    if kind == "automatic":
        return automatic(gpipe.PartitionSequentialLayers, number)
    return by_hand(gpipe.FeatureExtractionLayer.Params)


def run(folder, kind, number, restore):
    os.makedirs(folder)
    with tf.Graph().as_default():
        tf.compat.v1.set_random_seed(3)
        step = py_utils.GetOrCreateGlobalStepVar()
        layer = stack(gpipe.PipeliningLayer.Params, stages_of(kind, number)).Instantiate()
        loss, train_step = loss_and_step(layer, step)
        theirs = saver.Saver(folder, variables=tf.compat.v1.global_variables())
        with tf.compat.v1.Session() as session:
            if restore:
                # All variables are in it, or it is an error.
                theirs.Restore(session, path=restore)
            else:
                session.run(tf.compat.v1.global_variables_initializer())
                train(session, loss, train_step)
            _, path = theirs.Save(session)
            return {"path": path, "losses": train(session, loss, train_step)}


def main():
    flags.FLAGS.mark_as_parsed()
    py_utils.SetEagerMode(False)
    folder, *jobs = sys.argv[1:]
    for i, job in enumerate(jobs):
        kind, number, restore = job.split(":")
        print(json.dumps(run(f"{folder}/{i}", kind, int(number), restore)))


if __name__ == "__main__":
    main()
