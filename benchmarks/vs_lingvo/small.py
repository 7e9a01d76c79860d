"""Small blocks, where what a pipeline adds weighs most: TF1 and TF2, pipemesh and lingvo.

    python benchmarks/vs_lingvo/small.py

Five blocks of the language model, of dim 192, in two stages and eight microbatches, remat full (all
that lingvo has), no dropout. Each contender has a process of its own; they compute in turn.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import zlib

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from shared.contender import ROOT, Contender, serve_timed, take_turns
from shared.stack import quiet, set_threads

sys.path.insert(0, str(ROOT))

BATCH, TIME, DIM, STAGES, MICROBATCHES = 16, 32, 192, 2, 8
CONTENDERS = ("pipemesh, TF1", "lingvo, TF1", "pipemesh, TF2", "lingvo, TF2")


def initial(variable) -> np.ndarray:
    """The same for a variable of the same layer, whatever its stack is called."""
    name = "/".join(variable.name.split("/")[-4:])
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (0.1 * rng.normal(size=tuple(variable.shape))).astype(np.float32)


def stack_params(gpipe):
    """Params of the stack, of lingvo's `gpipe` or pipemesh's `layers`."""
    import tensorflow as tf
    from lingvo.core import py_utils

    from models.one_billion_word.transformer import Block

    class Alone(Block):
        """A block of one sequence a row; lingvo's pipeline takes floating tensors only."""

        def FProp(self, theta, hidden):
            zeros = tf.zeros(hidden.shape[:2], tf.int32)
            return super().FProp(theta, hidden, zeros, zeros, zeros, zeros)[0]

        @classmethod
        def FPropMeta(cls, p, hidden):
            return py_utils.NestedMap(flops=1, out_shapes=(hidden,))

    blocks = [
        Alone.Params().Set(name=f"block{i}", model_dim=DIM, hidden_dim=4 * DIM, num_heads=4)
        for i in range(5)
    ]
    cells = [
        gpipe.FeatureExtractionLayer.Params().Set(name=f"stage{i}", sub=part)
        for i, part in enumerate((blocks[:3], blocks[3:]))
    ]
    return gpipe.PipeliningLayer.Params().Set(
        name="stack", cell_tpl=cells, num_micro_batches=MICROBATCHES
    )


def make_step(library: str, mode: str):
    quiet()
    if mode == "TF2":
        set_threads(inter_op=2, intra_op=1, num_devices=STAGES)
    import tensorflow as tf
    from lingvo.core import cluster_factory, gpipe, py_utils

    import pipemesh.layers

    module = gpipe if library == "lingvo" else pipemesh.layers
    cluster = cluster_factory.ForTestingWorker(
        mode="sync", job="trainer_client", cpus=STAGES, split_size=STAGES
    )
    x = np.random.default_rng(0).normal(size=[BATCH, TIME, DIM]).astype(np.float32)

    def loss_of(layer):
        return tf.reduce_sum(tf.square(layer.FPropDefaultTheta(tf.constant(x))))

    if mode == "TF2":
        py_utils.SetEagerMode(True)
        with cluster:
            py_utils.GetOrCreateGlobalStepVar()
            layer = stack_params(module).Instantiate()
        variables = layer.vars.Flatten()
        for variable in variables:
            variable.assign(initial(variable))

        @tf.function(autograph=False)
        def step():
            with tf.GradientTape() as tape:
                loss = loss_of(layer)
            return loss, tf.linalg.global_norm(tape.gradient(loss, variables))

        def run():
            with cluster:
                return tuple(map(float, step()))

        return run
    with tf.Graph().as_default(), cluster:
        py_utils.GetOrCreateGlobalStepVar()
        layer = stack_params(module).Instantiate()
        variables = layer.vars.Flatten()
        loss = loss_of(layer)
        grads = tf.compat.v1.gradients(loss, variables, colocate_gradients_with_ops=True)
        fetches = [loss, tf.linalg.global_norm(grads)]
        config = tf.compat.v1.ConfigProto(
            device_count={"CPU": STAGES},
            inter_op_parallelism_threads=2,
            intra_op_parallelism_threads=1,
        )
        session = tf.compat.v1.Session(config=config)
        session.run(tf.compat.v1.global_variables_initializer())
        for variable in variables:
            variable.load(initial(variable), session)
    return lambda: tuple(float(v) for v in session.run(fetches))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", default=str(pathlib.Path(__file__).with_name("small.json")))
    arguments = parser.parse_args()
    if arguments.serve:
        serve_timed(make_step(*arguments.serve.split(", ")))
        return
    contenders = {
        name: Contender([sys.executable, __file__, "--serve", name]) for name in CONTENDERS
    }
    seconds, cpu_seconds, _ = take_turns(contenders, arguments.rounds, "pipemesh, TF2")
    print(f"5 blocks of dim {DIM}, {BATCH} rows of {TIME}; {arguments.rounds} rounds in turn")
    for name, times in seconds.items():
        ratio = statistics.median(
            mine / theirs for mine, theirs in zip(times, seconds["lingvo, TF1"], strict=True)
        )
        print(
            f"{name:14} {1e3 * statistics.median(times):6.0f} ms  CPU "
            f"{1e3 * statistics.median(cpu_seconds[name]):6.0f} ms  / lingvo, TF1 {ratio:.2f}"
        )
    pathlib.Path(arguments.out).write_text(json.dumps(seconds, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
