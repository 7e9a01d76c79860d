"""A small language model that is decoded under any plan, and what it ought to say."""

import functools

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.decoding import Decoder, Sampler
from pipemesh.decoding.generator import generator_of
from pipemesh.plan import Plan
from pipemesh.training.trained_task import TrainedTask
from tests.devices import KIND
from tests.models.one_billion_word.language_model import VOCAB_SIZE, small

LENGTH = 24
SETTINGS = {"LAYERS": "named", "NUM_LAYERS": 2, "NUM_HEADS": 4}
MODELS = {
    "dense": {},
    "tied": {"TIED_EMBEDDINGS": True},
    # No token is left out for want of room, as it might be in a longer row.
    "experts": {"NUM_EXPERTS": 4, "HIDDEN_DIM": 16, "CAPACITY_FACTOR": None},
    "deep": {"NUM_LAYERS": 4},
    "crowded": {"NUM_EXPERTS": 4, "HIDDEN_DIM": 16, "CAPACITY_FACTOR": 0.5},
}
PLAIN = Plan("layers:1", num_microbatches=1)


def prompts_of(*lengths):
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB_SIZE, size=length).tolist() for length in lengths]


PROMPTS = prompts_of(3, 7, 1, 5, 2, 9, 4)


def trained(plan=PLAIN, model="dense", kind=KIND, **settings):
    config = small(**SETTINGS | MODELS[model], PLAN=plan, **settings)
    return TrainedTask(config.Task(), plan, kind, 0, learns=False)


@functools.cache
def unpiped(model="dense"):
    """The model without a pipeline on a CPU, made once."""
    return trained(PLAIN, model, "CPU", PIPELINED=False)


def one_program(mesh, layout="", schedule="gpipe"):
    """A plan in which all devices run the same program."""
    return Plan(mesh, layout, schedule, 1, remat="full", lowering="simd")


def decoder(
    task, groups=2, rows=2, chooser=None, stop=(), length=LENGTH, vocab_size=VOCAB_SIZE, **options
):
    generator = generator_of(task, length, chooser or Sampler(), stop)
    sizes = {"rows": rows, "groups": groups, "length": length, "vocab_size": vocab_size}
    return Decoder(generator, **sizes, **options)


def in_order(found):
    return sorted(found, key=lambda each: each.number)


def tokens(found):
    return [each.tokens for each in in_order(found)]


@functools.cache
def log_probs_of(task):
    """A function of a row of ids: log probabilities of all tokens behind it, without a cache.

    By the loss that training has: a row for each label.
    """

    @tf.function(autograph=False)
    def losses(ids, labels):
        ones = tf.ones_like(ids)
        places = tf.tile([tf.range(LENGTH)], [VOCAB_SIZE, 1])
        with task.cluster(do_eval=True), py_utils.GlobalStepContext(task.step):
            theta = task.task.theta.stack
            weights = tf.cast(ones, tf.float32)
            return task.task.stack.FProp(theta, ids, labels, weights, ones, places)[2]

    def of(row):
        ids, labels = (np.zeros([VOCAB_SIZE, LENGTH], np.int32) for _ in range(2))
        ids[:, : len(row)] = row
        labels[:, len(row) - 1] = range(VOCAB_SIZE)
        return -losses(ids, labels).numpy()[:, len(row) - 1]

    return of


def greedy(task, prompts, number):
    """The most likely tokens behind each prompt, and their log probabilities, one by one."""
    of, found = log_probs_of(task), []
    for prompt in prompts:
        row, logs = list(prompt), []
        for _ in range(number):
            chances = of(row)
            row.append(int(np.argmax(chances)))
            logs.append(float(chances.max()))
        found.append((tuple(row[-number:]), logs))
    return found
