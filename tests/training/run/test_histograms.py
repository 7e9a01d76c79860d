"""Histograms that TensorBoard reads: of each weight, its gradient, and what a step changed."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.training import Options, Trainer
from pipemesh.training.registered import RegisteredModel
from pipemesh.training.run.histograms import Histograms
from tests.models.one_billion_word.small_training import summaries
from tests.training import small_models
from tests.training.run.test_telling import trained

KINDS = "weights", "gradients", "updates"


def histograms(logdir):
    """By tag and step: the buckets' sums, and the range."""
    found = {}
    for path in (logdir / "train").iterdir():
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "histograms":
                    found[value.tag, event.step] = tf.make_ndarray(value.tensor)
    return found


def test_histograms_come_every_so_many_steps(eagerly, tmp_path, capsys):
    assert trained(tmp_path, 5, histogram_every=2) == 0
    found = histograms(tmp_path)
    assert {step for _, step in found} == {2, 4}
    names = {tag.partition("/")[2] for tag, _ in found}
    assert "points/dense/w" in names and not any("moving" in name for name in names)
    assert {tag for tag, _ in found} == {f"{kind}/{name}" for kind in KINDS for name in names}
    # 4 inputs and 1 output; a step changes them by little.
    buckets = found["weights/points/dense/w", 4]
    assert buckets[:, 2].sum() == 4
    updates = found["updates/points/dense/w", 4]
    assert updates[:, 2].sum() == 4 and 0 < np.abs(updates[:, :2]).max() < 0.5
    gradients = found["gradients/points/dense/w", 4]
    assert gradients[:, 2].sum() == 4 and np.abs(gradients[:, :2]).max() > 0


def test_without_the_flag_there_are_none(eagerly, tmp_path, capsys):
    assert trained(tmp_path, 2) == 0
    assert histograms(tmp_path) == {} and list(summaries_of(tmp_path))


def summaries_of(logdir):
    return (tag for tag, *_ in summaries(logdir))


def test_a_weight_in_slices_is_one():
    parts = [tf.Variable([[1.0, 2.0]]), tf.Variable([[3.0]])]
    seen = Histograms({"w": parts}, every=1)
    seen.before(7)
    parts[1].assign_add([[1.0]])
    found = seen.after({"w": [tf.constant([[5.0, 6.0]]), tf.constant([[7.0]])]})
    assert found["weights/w"].tolist() == [1, 2, 4] and found["updates/w"].tolist() == [0, 0, 1]
    assert found["gradients/w"].tolist() == [5, 6, 7]
    # What was skipped is not looked at.
    seen.before(8)
    seen.before(9)
    assert list(seen.after()) == ["weights/w", "updates/w"]


@pytest.mark.parametrize("name", ["StagedPoints", "SplitPoints"])
def test_weights_of_stages_are_told_by_their_logical_names(eagerly, tmp_path, capsys, name):
    assert trained(tmp_path, 1, name, histogram_every=1) == 0
    tags = {tag for tag, _ in histograms(tmp_path)}
    assert tags and not any("_slice_" in tag for tag in tags)
    of = {kind: {tag.partition("/")[2] for tag in tags if tag.startswith(kind)} for kind in KINDS}
    assert of["gradients"] == of["weights"] == of["updates"]


@pytest.mark.parametrize("name", ["StagedPoints", "SplitPoints"])
def test_gradients_are_the_plain_models(eagerly, tmp_path, name):
    def gradients(plain):
        options = Options(logdir=str(tmp_path), steps=1, histogram_every=1)
        model = RegisteredModel(getattr(small_models, name)(), name, plain=plain)
        trainer = Trainer(model, options)
        trainer.train_step()
        return {
            name: np.concatenate([np.ravel(part) for part in parts])
            for name, parts in trainer.gradients.items()
        }

    found, wanted = gradients(False), gradients(True)
    assert found.keys() == wanted.keys()
    for weight, gradient in found.items():
        np.testing.assert_allclose(np.sort(gradient), np.sort(wanted[weight]), atol=1e-6)
        assert np.abs(gradient).max() > 0
