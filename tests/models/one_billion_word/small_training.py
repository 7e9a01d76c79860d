"""The whole program with a small model, inside the test's process."""

import shutil

import numpy as np
import tensorflow as tf
from tensorflow.core.util import event_pb2

from models.one_billion_word.request import Request
from pipemesh.plan import Plan
from tests.models.one_billion_word.language_model import small


def small_request(logdir, folder=None, *, steps=6, plan=None, **changes):
    """Asks for a model of one block on one device, and for text from files of a folder.

    Capitals change settings, what is small changes the request.
    """
    settings = small(
        CHOSEN=(),
        PLAN=plan or Plan(num_microbatches=2),
        **{"VOCAB_SIZE": 420, "NUM_LAYERS": 1}
        | {name: changes.pop(name) for name in list(changes) if name.isupper()},
    )
    if folder is not None:
        settings.DATA_DIR = str(folder)
        settings.TRAIN_PATTERN, settings.HELDOUT_PATTERN = "train*", "heldout*"
    values = {"save_every": 3, "eval_every": 1000, "eval_batches": 2} | changes
    return Request(
        model="OneBillionWordTiny",
        settings=settings,
        device_type="CPU",
        logdir=str(logdir),
        steps=steps,
        **values,
    )


def summaries(logdir, part="train", killed=False):
    """Tag, step and value of each scalar in the order in which they were written.

    The last record of a file may be cut short if its writer was killed.
    """
    for path in sorted((logdir / part).iterdir(), key=lambda path: path.stat().st_mtime):
        try:
            for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
                event = event_pb2.Event.FromString(record)
                for value in event.summary.value:
                    yield value.tag, event.step, float(tf.make_ndarray(value.tensor))
        except tf.errors.DataLossError:
            if not killed:
                raise


def scalars(logdir, tag, part="train"):
    """The values of a scalar in the order in which they were written."""
    return [value for name, _, value in summaries(logdir, part) if name == tag]


def weights(logdir, step):
    """What is saved of a step but the position in the text, by name."""
    reader = tf.train.load_checkpoint(str(logdir / f"ckpt-{step}"))
    names = [n for n in reader.get_variable_to_shape_map() if not n.startswith("data/")]
    return {name: reader.get_tensor(name) for name in names}


def begun(logdir, step, other):
    """Another log directory that knows a training up to the checkpoint of a step."""
    other.mkdir()
    found = list(logdir.glob(f"ckpt-{step}.*"))
    assert found, "it is not kept"
    for path in found:
        shutil.copy2(path, other)
    shutil.copytree(logdir / "vocabulary", other / "vocabulary")
    return other


def assert_same_weights(one, two):
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name], err_msg=name)
