"""Registered models whose files say how large they are."""

import json

import numpy as np
import pytest
import tensorflow as tf

from models.pretrained import config, params, transfer
from models.pretrained.config import WeightsError
from pipemesh.errors import PlanError
from pipemesh.layers import DatasetInput
from pipemesh.layers.named import RotaryScaling
from pipemesh.plan import Plan
from pipemesh.training.registered import RegisteredModel
from pipemesh.training.run import Options
from pipemesh.training.trainer import Trainer
from tests.models.pretrained import small


class Averaged(params.Gpt2):
    """Keeps moving averages; there are batches of nothing."""

    PLAN = Plan("layers:1", num_microbatches=1)
    BATCH_SIZE, SEQUENCE_LENGTH = 1, 2

    def Train(self):
        rows = {name: tf.zeros([1, 2], tf.int32) for name in ("ids", "labels", "segment_pos")}
        rows |= {"weights": tf.ones([1, 2]), "segment_ids": tf.ones([1, 2], tf.int32)}
        return DatasetInput.Params().Set(
            name="Train", dataset=lambda: tf.data.Dataset.from_tensors(rows)
        )

    def Task(self):
        p = super().Task()
        p.train.ema_decay = 0.9
        return p


@pytest.mark.slow
@pytest.mark.usefixtures("eagerly")
def test_averages_begin_with_the_weights_that_came(tmp_path):
    small.write(tmp_path / "in", small.GPT2, small.tensors_of(small.GPT2))
    transfer.import_weights(str(tmp_path / "in"), str(tmp_path / "run"))
    model = Averaged()
    model.LOGDIR = str(tmp_path / "run")
    options = Options(logdir=model.LOGDIR, steps=1)
    trainer = Trainer(RegisteredModel(model, "Averaged"), options, f"{model.LOGDIR}/ckpt-0", True)
    trained = trainer.trained
    variables = trained.task.vars.Flatten()
    assert len(trained.averages()) == len(variables) > 20
    for variable in variables:
        average = trained.task.ema.average(variable)
        np.testing.assert_array_equal(average.numpy(), variable.numpy(), err_msg=variable.name)
    # Begun elsewhere, every one of these is drawn.
    assert len({float(tf.reduce_sum(variable)) for variable in variables}) == len(variables)


def test_the_file_says_the_sizes_and_the_class_the_rest(tmp_path):
    model = params.Llama()
    with pytest.raises(WeightsError, match="which says how large the model is"):
        model.Task()
    model.CONFIG = config.of_values(small.RICH_LLAMA)
    assert params.length_of(model) == 16
    embedding, block, _, head = params.layers_of(model.CONFIG)
    assert (embedding.vocab_size, embedding.positions, embedding.dropout_rate) == (24, "none", 0)
    assert (block.attention_tpl.dim_per_head, block.attention_tpl.num_kv_heads) == (8, 2)
    assert block.attention_tpl.rotary_scaling == RotaryScaling(5.0, length=8, low=0.1, high=1.0)
    assert block.attention_tpl.rotary_base == 50.0 and block.attention_tpl.use_bias
    assert block.norm_tpl.kind == head.norm_tpl.kind == "rms"
    assert block.feed_forward_tpl.activation == "SWIGLU"
    dropped = small.GPT2 | {"embd_pdrop": 0.2, "resid_pdrop": 0.3}
    for asked, rates in ((None, (0.2, 0.3)), (0.1, (0.1, 0.1)), (0.0, (0.0, 0.0))):
        first, block, *_ = params.layers_of(config.of_values(dropped), asked)
        assert (first.dropout_rate, block.dropout_rate) == rates
    (tmp_path / "config.json").write_text(json.dumps(small.GPT2))
    model = params.Llama()
    model.LOGDIR = str(tmp_path)
    with pytest.raises(WeightsError, match="Llama has model_type 'llama', but"):
        model.Task()


def test_a_batch_that_does_not_divide_is_told_by_the_flag():
    model = params.Gpt2()
    model.CONFIG = config.of_values(small.GPT2)
    values = {"num_microbatches": "16"}
    with pytest.raises(PlanError, match=r"num_microbatches=16: a batch of 8 .*Gpt2 with another"):
        RegisteredModel(model, "Gpt2", values)


def test_there_is_data_to_judge_by_where_there_is_text():
    model = params.Gpt2()
    model.CONFIG = config.of_values(small.GPT2)
    assert list(model.GetAllDatasetParams()) == ["Train"]
    model.TRAIN_TEXT, model.HELDOUT_TEXT = "a", "b"
    found = model.GetAllDatasetParams()
    assert list(found) == ["Train", "Dev", "Test"]
    assert found["Train"].dataset.args[0] == "a" and found["Dev"].dataset.args[0] == "b"
