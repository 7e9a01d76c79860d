"""Any registered model of lingvo, trained by the same trainer."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import NotFiniteError, PlanError, TrainingError
from pipemesh.training import Options, Trainer
from pipemesh.training.evaluation import evaluate
from pipemesh.training.registered import RegisteredModel, find_model
from tests.training import small_models

MODULE = "tests.training.small_models"


def subject(name="PlainPoints", values=None, **changes):
    return RegisteredModel(getattr(small_models, name)(), f"{MODULE}.{name}", values, **changes)


def trainer(logdir, name="PlainPoints", values=None, restore=None, **changes):
    logdir.mkdir(exist_ok=True)
    options = Options(logdir=str(logdir), steps=9, max_to_keep=9)
    return Trainer(subject(name, values, **changes), options, restore, keeps_place=True)


def saved(logdir, step):
    reader = tf.train.load_checkpoint(str(logdir / f"ckpt-{step}"))
    names = [n for n in reader.get_variable_to_shape_map() if not n.startswith("data/")]
    return {name: reader.get_tensor(name) for name in names}


def losses(made, steps):
    return [made.train_step()["loss"] for _ in range(steps)]


@pytest.mark.parametrize("name", ["PlainPoints", "StagedPoints"])
def test_a_training_that_goes_on_equals_one_that_never_stopped(eagerly, tmp_path, name):
    """Dropout is on, outside of a pipeline as well, and batch norm has averages."""
    whole = trainer(tmp_path, name)
    wanted = losses(whole, 3)
    path = whole.save()
    wanted += losses(whole, 3)
    whole.save()
    expected = saved(tmp_path, 6)
    again = trainer(tmp_path / "again", name, restore=path)
    assert losses(again, 3) == wanted[3:] and len(set(wanted)) == 6
    again.save()
    found = saved(tmp_path / "again", 6)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    if name == "PlainPoints":
        assert found["points/norm/moving_mean/var"].any()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("StagedPoints", {"mesh": "layers:2;data:2", "layout": "batch:data"}),
        ("StagedPoints", {"num_microbatches": "4", "schedule": "1f1b", "remat": "none"}),
        ("PlannedPoints", {"mesh": "layers:4", "num_microbatches": "8"}),
    ],
)
def test_losses_do_not_depend_on_the_plan(eagerly, tmp_path, name, values):
    # One after the other: lingvo has one global step.
    alone = {"mesh": "layers:1"} if name == "PlannedPoints" else None
    wanted = losses(trainer(tmp_path / "plain", name, alone, plain=True), 5)
    planned = trainer(tmp_path / "planned", name, values)
    np.testing.assert_allclose(losses(planned, 5), wanted, rtol=1e-5)
    path = planned.save()
    judged = [evaluate(subject(name, other), path) for other in ({}, values)]
    assert judged[0][0] == 5
    np.testing.assert_allclose(judged[0][1].judged, judged[1][1].judged, rtol=1e-5)


def test_a_batch_that_is_not_finite_leaves_no_trace(eagerly, tmp_path):
    """Batch norm has moved its averages by then, without a gradient."""
    made = trainer(tmp_path, "SpoiledPoints")
    losses(made, 3)
    before = {v.name: v.numpy() for v in made.trained.task.vars.Flatten()}
    with pytest.raises(NotFiniteError):
        made.train_step()
    for variable in made.trained.task.vars.Flatten():
        np.testing.assert_array_equal(variable.numpy(), before[variable.name])
    made.skip()
    assert np.isfinite(losses(made, 2)).all() and (made.step, made.skipped) == (6, 1)


def test_evaluation_sees_each_held_out_batch_once(eagerly, tmp_path):
    made = trainer(tmp_path)
    losses(made, 2)
    step, score = evaluate(subject(), made.save())
    assert step == 2 and score.amount == 5 * small_models.BATCH
    with made.trained.cluster(do_eval=True):
        task = made.trained.task
        batches = small_models.points(2, 5)
        alone = [task.FPropTower(task.theta, b)[0]["accuracy"][0].numpy() for b in batches]
    np.testing.assert_allclose(score.values()["accuracy"], np.mean(alone), rtol=1e-6)
    assert str(score).startswith("loss 0.") and ", accuracy 0." in str(score)


def test_an_input_without_a_dataset_trains_and_its_place_is_not_saved(eagerly, tmp_path):
    made = trainer(tmp_path, "DrawnPoints")
    assert not made.is_restorable
    losses(made, 2)
    again = trainer(tmp_path, "DrawnPoints", restore=made.save())
    assert again.step == 2 and not again.keeps_place
    assert np.isfinite(losses(again, 1)).all()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Points", "names no module"),
        ("no_such.Points", "there is no module 'no_such'"),
        (f"{MODULE}.Plainpoints", "did you mean 'PlainPoints'"),
        (f"{MODULE}.Classifier", "is no class of lingvo's SingleTaskModelParams"),
    ],
)
def test_a_model_that_is_none_is_told(name, told):
    with pytest.raises(TrainingError, match=told):
        find_model(name)


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("PlainPoints", {"mesh": "layers:2"}, "has no PipeliningLayer, so it computes on one"),
        ("PlainPoints", {"schedule": "1f1b"}, "has no PipeliningLayer, for which it is"),
        ("StagedPoints", {"boundaries": "0,2,5"}, "give the class an attribute PLAN"),
    ],
)
def test_a_plan_that_a_model_cannot_have_is_an_error(name, values, told):
    with pytest.raises(PlanError, match=told):
        subject(name, values)


def test_a_dataset_that_is_not_there_is_an_error():
    with pytest.raises(TrainingError, match=r"no such dataset.*'Test'"):
        subject(dataset="Tset")
    with pytest.raises(TrainingError, match="no such dataset"):
        subject(dataset="Dev")


def test_several_learners_are_an_error(eagerly, tmp_path):
    class Several(small_models.PlainPoints):
        def Task(self):
            p = super().Task()
            p.train.learner = [p.train.learner, p.train.learner.Copy().Set(name="second")]
            return p

    options = Options(logdir=str(tmp_path), steps=1)
    with pytest.raises(TrainingError, match="2 learners"):
        Trainer(RegisteredModel(Several(), "Several"), options)
