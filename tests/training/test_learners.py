"""Several learners and losses of one task: equal to lingvo's, and all updates or none."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import gradient_combiner, learner, optimizer, py_utils, schedule

from pipemesh.errors import NotFiniteError, TrainingError
from pipemesh.training import Options, Trainer
from pipemesh.training.registered import RegisteredModel
from tests.training import small_models

BAD_STEP = 3


class Sum(gradient_combiner.GradientCombiner):
    """The sum of the gradients of all losses."""

    def Combine(self, vmap, losses_and_gradients):
        grads = [each.grads for each in losses_and_gradients.values()]
        return tf.nest.map_structure(lambda *parts: tf.add_n(parts), *grads), {}


class TwoLosses(small_models.Classifier):
    """A second loss, which is not finite in one step; nothing random."""

    def __init__(self, params):
        super().__init__(params)
        self.dropout.params.keep_prob = 1.0

    def ComputeLoss(self, theta, predictions, input_batch):
        metrics, rest = super().ComputeLoss(theta, predictions, input_batch)
        bad = tf.equal(py_utils.GetGlobalStep(), BAD_STEP)
        size = tf.reduce_mean(tf.square(predictions)) * tf.where(bad, np.nan, 1.0)
        return metrics | {"size": (size, metrics["loss"][1])}, rest


def learner_of(name, **changes):
    return learner.Learner.Params().Set(
        name=name,
        learning_rate=0.1,
        optimizer=optimizer.Adam.Params(),
        lr_schedule=schedule.Constant.Params(),
        **changes,
    )


class TwoLearners(small_models.PlainPoints):
    """One learner for the matrix, and one for all else, which has two losses."""

    def Task(self):
        p = TwoLosses.Params().Set(name="points", random_seed=5)
        p.train.learner = [
            learner_of("loss", bprop_variable_filter="dense/w", clip_gradient_norm_to_value=0.1),
            learner_of(
                "second",
                bprop_variable_exclusion="dense/w",
                loss_name=["size", "loss"],
                gradient_combiner=Sum.Params().Set(name="sum"),
            ),
        ]
        return p


def trainer_of(config, logdir, **settings):
    return Trainer(
        RegisteredModel(config, "Model"), Options(logdir=str(logdir), steps=9), **settings
    )


def weights_of(task):
    return {v.name: v.numpy() for v in task.vars.Flatten() if v.trainable}


def lingvos_weights(initial, batches):
    """The weights after lingvo's own learners, one after the other."""
    p = TwoLearners().Task()
    step = py_utils.GetOrCreateGlobalStepVar()
    step.assign(0)
    with py_utils.VariableStore():
        task = p.Instantiate()
    for variable in task.vars.Flatten():
        if variable.trainable:
            variable.assign(initial[variable.name])

    def train(batch):
        with py_utils.GradientTape(persistent=True), py_utils.GlobalStepContext(step):
            metrics, _ = task.FPropTower(task.theta, batch)
            for each in task.learners:
                each.Apply(metrics, task.vars)

    for batch in batches:
        train(batch)
        step.assign_add(1)
    return weights_of(task)


def test_learners_are_lingvos_and_all_update_or_none(eagerly, tmp_path):
    made = trainer_of(TwoLearners(), tmp_path)
    initial, batches = weights_of(made.trained.task), []
    for _ in range(BAD_STEP):
        result = made.train_step()
        batches.append(made.batch)
    assert {"loss", "size"} <= set(result["score"].values())
    assert result["gradient_norm"] > 0
    state = {name: v.numpy() for name, v in made.trained.state().items()}
    # Twice the two powers of Adam, two slots of each of four weights.
    assert sum("power" in name for name in state) == 4
    assert sum("/Adam" in name for name in state) == 8
    with pytest.raises(NotFiniteError, match="the loss is not finite"):
        made.train_step()
    for name, variable in made.trained.state().items():
        np.testing.assert_array_equal(variable.numpy(), state[name], err_msg=name)
    made.skip()
    assert np.isfinite(made.train_step()["loss"])
    # A checkpoint has the state of both.
    path = made.save()
    again = trainer_of(TwoLearners(), tmp_path, restore=path, keeps_place=True)
    assert again.train_step()["loss"] == made.train_step()["loss"]
    wanted = lingvos_weights(initial, batches)
    for name, value in wanted.items():
        found = state[name.removesuffix(":0")]
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6, err_msg=name)
        assert np.abs(value - initial[name]).max() > 1e-3, name


def test_pipelined_learners_are_as_one(eagerly, tmp_path):
    class Several(small_models.ShortStagedPoints):
        def Task(self):
            p = super().Task()
            one, other = p.train.learner.Copy(), p.train.learner.Copy()
            one.bprop_variable_filter = other.bprop_variable_exclusion = "dense/w"
            p.train.learner = [one, other.Set(name="other", loss_name="loss")]
            return p

    found = []
    for number, config in enumerate((small_models.ShortStagedPoints(), Several())):
        logdir = tmp_path / str(number)
        logdir.mkdir()
        made = trainer_of(config, logdir)
        losses = [made.train_step()["loss"] for _ in range(3)]
        found.append((losses, weights_of(made.trained.task)))
    (losses, weights), (others, other_weights) = found
    np.testing.assert_allclose(others, losses, rtol=1e-6)
    for name, value in weights.items():
        np.testing.assert_allclose(other_weights[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_weight_has_one_learner(eagerly, tmp_path):
    class Overlapping(TwoLearners):
        def Task(self):
            p = super().Task()
            p.train.learner[1].bprop_variable_exclusion = None
            return p

    with pytest.raises(TrainingError, match="'second' trains 'points/dense/w/var', which another"):
        trainer_of(Overlapping(), tmp_path)
    with pytest.raises(TrainingError, match=r"change one learner, but .* has loss, second; change"):
        RegisteredModel(TwoLearners(), "Model").learn({"learning_rate": 0.1})
