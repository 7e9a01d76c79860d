"""Any registered model of lingvo, trained by the same trainer."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from models.digits.params import DigitsPipelined
from pipemesh.errors import DataError, NotFiniteError, PlanError, TrainingError
from pipemesh.layers import DatasetInput
from pipemesh.recurrent import Selective
from pipemesh.schedule import one_f_one_b
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


def test_a_resumed_run_equals_an_uninterrupted_one(eagerly, tmp_path):
    """Dropout is on, and batch norm has averages."""
    whole = trainer(tmp_path)
    wanted = losses(whole, 3)
    path = whole.save()
    wanted += losses(whole, 3)
    whole.save()
    expected = saved(tmp_path, 6)
    again = trainer(tmp_path / "again", restore=path)
    assert losses(again, 3) == wanted[3:] and len(set(wanted)) == 6
    again.save()
    found = saved(tmp_path / "again", 6)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    assert found["points/norm/moving_mean/var"].any()


SPLIT = {"mesh": "layers:2;data:2", "layout": "batch:data"}


def test_losses_do_not_depend_on_the_plan(eagerly, tmp_path):
    """Nor does the score of held-out batches, of which the last one is uneven."""
    # One after the other: lingvo has one global step.
    wanted = losses(trainer(tmp_path / "plain", "UnevenPoints", plain=True), 5)
    planned = trainer(tmp_path / "planned", "UnevenPoints", SPLIT)
    np.testing.assert_allclose(losses(planned, 5), wanted, rtol=1e-5)
    assert [len(batch.x) for batch in planned.whole] == [8] * 5 + [3]
    found = planned.evaluate(planned.whole)
    assert found.amount == 43
    path = planned.save()
    step, score = evaluate(subject("UnevenPoints", plain=True), path)
    assert step == 5
    np.testing.assert_allclose(found.judged, score.judged, rtol=1e-5)
    # It counts by its rows.
    assert evaluate(subject("ShortStagedPoints"), path)[1].judged != pytest.approx(score.judged)


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


def test_an_input_without_a_dataset_has_no_position(eagerly, tmp_path):
    made = trainer(tmp_path, "DrawnPoints")
    assert not made.batches.is_restorable
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
        (f"{MODULE}.SeveralTasks", "of several tasks, but one is trained; give a class of"),
        # Only models are offered.
        ("models.digits.params.Nothing", r"known: 'DigitsPlain', 'DigitsPipelined'$"),
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
        # It was a warning of Python's, and the other devices idled.
        (
            "StagedPoints",
            {"mesh": "layers:4"},
            r"^mesh=layers:4: .* need 2 .*; use layers:2, or set allow_idle$",
        ),
    ],
)
def test_a_plan_that_a_model_cannot_have_is_an_error(name, values, told):
    with pytest.raises(PlanError, match=told):
        subject(name, values)


def test_devices_may_idle_if_that_is_allowed():
    values = {"mesh": "layers:4", "allow_idle": "true"}
    assert subject("StagedPoints", values).plan.mesh.num_stages == 4


def test_a_batch_that_does_not_divide_is_found_before_the_model_is_made():
    model = RegisteredModel(DigitsPipelined(), "Digits", {"num_microbatches": "7"})
    with pytest.raises(PlanError, match="a batch of 64 does not divide into 7 microbatches"):
        model.check_batch()


def test_a_dataset_that_is_not_there_is_an_error():
    for dataset, told in (("Tset", r"no such dataset.*'Test'"), ("Dev", "no such dataset")):
        with pytest.raises(TrainingError, match=told):
            subject(dataset=dataset)


def changed(base, change):
    """A model whose task has the params that `change` makes of those of another one."""

    class Model(base):
        def Task(self):
            return change(super().Task())

    return Model()


def trained_by(config, logdir):
    return Trainer(RegisteredModel(config, "Model"), Options(logdir=str(logdir), steps=1))


def test_a_nonfinite_loss_with_finite_gradients_fails(eagerly, tmp_path):
    class Offset(small_models.Classifier):
        def ComputeLoss(self, theta, predictions, input_batch):
            metrics, rest = super().ComputeLoss(theta, predictions, input_batch)
            loss, rows = metrics["loss"]
            # Not in the gradient.
            metrics["loss"] = (loss + tf.constant(float("nan")), rows)
            return metrics, rest

    made = trained_by(changed(small_models.PlainPoints, lambda p: p.Set(cls=Offset)), tmp_path)
    before = [v.numpy() for v in made.trained.task.vars.Flatten()]
    with pytest.raises(NotFiniteError, match=r"^the loss is not finite$"):
        made.train_step()
    for value, variable in zip(before, made.trained.task.vars.Flatten(), strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_generator_that_changes_batches_is_refused(eagerly, tmp_path):
    """lingvo refuses both, a dataset and a function of one's own; neither may win in silence."""

    class Doubled(small_models.Points):
        def _PreprocessInputBatch(self, batch):
            batch.x *= 2
            return batch

    class Model(small_models.PlainPoints):
        def Train(self):
            return Doubled.Params()

    with pytest.raises(ValueError, match="do not go through"):
        trained_by(Model(), tmp_path)


def test_stacks_with_meshes_of_their_own_are_an_error():
    class Two(small_models.Pipelined):
        @classmethod
        def Params(cls):
            p = super().Params()
            p.Define("second", None, "Another stack.")
            return p

    def two(p):
        second = p.stack.Copy().Set(mesh_shape="layers:2;data:2", layout="batch:data")
        return Two.Params().Set(name="two", stack=p.stack, second=second)

    with pytest.raises(PlanError, match="has stacks with meshes or layouts of their own"):
        RegisteredModel(changed(small_models.StagedPoints, two), "Model")


def test_the_plan_has_the_params_of_a_stack():
    own = {"stack.schedule": one_f_one_b(2, 2), "stack.remat": Selective(lambda name: True)}
    config = changed(small_models.StagedPoints, lambda p: p.Set(**own))
    plan = RegisteredModel(config, "Model").plan
    assert plan.table == one_f_one_b(2, 2) and plan.remat.is_custom
    plain = RegisteredModel(config, "Model", plain=True)
    assert plain.plan.mesh.num_devices == 1 and not plain.has_actions()


def test_arguments_of_partial_functions_are_noted():
    """Else a training would go on in the data of another seed."""

    class Model(small_models.PlainPoints):
        SEED = 3

        def Train(self):
            return DatasetInput.Params().Set(
                name="points",
                dataset=functools.partial(small_models.points, self.SEED, number=None),
            )

    settings = RegisteredModel(Model(), "Model").note()["settings"]
    assert settings["input.dataset"] == "points(3, number=None)"


def test_a_model_may_be_judged_by_nothing(eagerly, tmp_path):
    made = trainer(tmp_path, dataset="none")
    assert not made.sample.batches
    losses(made, 1)
    assert made.save().endswith("ckpt-1")
    with pytest.raises(DataError, match="has no held-out data"):
        evaluate(subject(dataset="none"), made.saving.newest)
