"""A program that reads data on a worker and in this process.

    python -m tests.hosts.reading WORKER FOLDER

Prints a line of JSON: what differs between the two, the errors of data that a worker cannot read,
and what this process sends and gets in a step of training.
"""

import functools
import json
import os
import sys
import tempfile

import numpy as np
import tensorflow as tf

from models.one_billion_word import command_line, sizes
from models.one_billion_word.corpus import Sentences, corpus_from_folder
from models.one_billion_word.input import train_dataset
from models.one_billion_word.kind import make_trainer, read_text
from models.one_billion_word.vocabulary import train_vocabulary
from pipemesh.backend.cluster import worker_devices
from pipemesh.backend.dataset_functions import calls_this_process
from pipemesh.checkpoint import Checkpoints
from pipemesh.checkpoint.reader import restore
from pipemesh.commands.flags import Command, parse
from pipemesh.data import DocumentBatches
from pipemesh.errors import CheckpointError, PipemeshError
from pipemesh.training.inputs import NAME, Batches
from tests.hosts.trained import bytes_of_sockets

LINES = [f"the {number} of them says {number * 7} words" for number in range(200)]
READ = 3
SIZES = ["--vocab_size=400", "--batch_size=32", "--sequence_length=256"]


def no_tokenizer():
    return None, 100


def text_files(folder):
    corpus = corpus_from_folder(folder, "*.txt", "heldout")
    vocabulary = train_vocabulary(Sentences(tuple(LINES)), 300)
    return train_dataset(corpus, vocabulary, batch_size=4, sequence_length=32, seed=3)


def documents(folder, **more):
    return DocumentBatches(f"{folder}/ids.jsonl", no_tokenizer, 16, 2, seed=5, **more)


def nobody_elsewhere(folder):
    return DocumentBatches(f"{folder}/ids.jsonl", lambda: (None, 100), 16, 2, seed=5)()


def other_files(folder):
    found = documents(folder)
    # As if they were others where training was started.
    found.__dict__["_files"] = ["other"]
    return found()


def python_of_tensorflow(_):
    def twice(number):
        return number * 2

    return tf.data.Dataset.range(9).map(lambda n: tf.numpy_function(twice, [n], tf.int64))


def with_other_state():
    return tf.data.Dataset.range(9).map(lambda _: {"x": tf.random.uniform([2])})


def sparse():
    return tf.data.Dataset.range(9).map(lambda n: tf.sparse.from_dense([n + 1, 0]))


def batches(make, worker=None):
    with tf.device(worker):
        return Batches(make())


def same(one, other):
    return all(np.array_equal(one[name].numpy(), other[name].numpy()) for name in one)


def compared(make, worker, folder):
    here, there, later, resumed = (batches(make, place) for place in (None, worker, worker, None))
    found = {}
    for _ in range(READ):
        wanted, read = here.next(), there.next()
        found["batches"] = found.get("batches", True) and same(wanted, read)
        found["on"] = {name: tensor.backing_device for name, tensor in read.items()}
    path = Checkpoints(folder, {NAME: there.iterator}).save(READ, {})
    wanted = here.next()
    for name, reader in (("there again", later), ("resumed here", resumed)):
        restore(path, {NAME: reader.iterator})
        found[name] = same(wanted, reader.next())
    return found


def error(make, worker):
    try:
        batches(make, worker).next()
    except PipemeshError as refused:
        return str(refused)


def positions(documents, worker, folder):
    """Tests positions that cannot be saved, and returns errors of those of another dataset."""
    path = Checkpoints(folder, {NAME: batches(documents).iterator}).save(READ, {})
    found = {"restorable": [], "misfits": []}
    for place in (None, worker):
        random = batches(with_other_state, place)
        found["restorable"].append(random.is_restorable)
        # An error of the question must not come with the next operation.
        assert random.next()["x"].shape == [2]
        numbers = batches(functools.partial(tf.data.Dataset.range, 9), place)
        try:
            restore(path, {NAME: numbers.iterator})
        except CheckpointError as refused:
            found["misfits"].append(str(refused))
        assert int(batches(functools.partial(tf.data.Dataset.range, 9), place).next()) == 0
    found["sparse"] = batches(sparse, worker).next().values.backing_device
    return found


def trained(address, folder):
    """Bytes of this process in a step, and those of a batch, which the worker reads."""
    sizes.Tiny.NUM_LAYERS = 1
    words = [f"--cluster={address}", "--read_data=workers", "--num_microbatches=2", *SIZES]
    words += ["--mesh_shape=layers:1", f"--logdir={tempfile.mkdtemp(dir=folder)}"]
    parse(["reading", *words], Command("reading", None, command_line.FLAGS_OF_TRAINING))
    request = command_line.request()
    trainer, _ = make_trainer(request, read_text(request))
    losses = [trainer.train_step()["loss"] for _ in range(READ)]
    carried = []
    for _ in range(READ):
        before = bytes_of_sockets()
        losses.append(trainer.train_step()["loss"])
        carried.append(bytes_of_sockets() - before)
    leaves = tf.nest.flatten(trainer.batch)
    return {
        "losses": losses,
        # A slow step carries more requests of how the worker is.
        "carried": min(carried),
        "batch": sum(leaf.dtype.size * leaf.shape.num_elements() for leaf in leaves),
        "on": [leaf.backing_device for leaf in leaves],
    }


def main(address, folder):
    found = {"trained": trained(address, folder)}
    (worker,) = worker_devices("CPU")[0]
    makes = {
        "text files": functools.partial(text_files, folder),
        "documents": documents(folder),
        "buckets": documents(folder, packing="whole", buckets="8"),
    }
    os.chdir(folder)
    makes["relative"] = documents(".")
    found["positions"] = positions(makes["documents"], worker, tempfile.mkdtemp(dir=folder))
    foreign = python_of_tensorflow(None), makes["documents"](), text_files(folder)
    refused = {
        make.__name__: error(functools.partial(make, folder), worker)
        for make in (nobody_elsewhere, other_files)
    }
    found["read"] = {
        name: compared(make, worker, tempfile.mkdtemp(dir=folder)) for name, make in makes.items()
    }
    found["foreign"] = [calls_this_process(dataset) for dataset in foreign]
    print(json.dumps({**found, "refused": refused, "worker": worker}), flush=True)


if __name__ == "__main__":
    # Workers import what reads the data; they know another `__main__`.
    from tests.hosts import reading

    reading.main(*sys.argv[1:])
    # Python would wait for what is connected.
    sys.stdout.flush()
    os._exit(0)
