"""BERT learns masked tokens and T5 spans or pairs, under every plan; both by commands."""

import json
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tokenizers

from models.pretrained import params, transfer
from pipemesh.training.evaluation import Predictor
from pipemesh.training.registered import RegisteredModel, batch_sizes
from pipemesh.training.run import Options
from pipemesh.training.trainer import Trainer
from tests.commands import program
from tests.models.pretrained import small

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("eagerly")]

WORDS = ["the", "cat", "sat", "on", "mat", "a", "dog", "ran"]
SPECIAL = {
    "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    "t5": ["<pad>", "</s>", "<unk>", *(f"<extra_id_{i}>" for i in range(4))],
}
TEMPLATES = {"bert": "[CLS] $A [SEP]", "t5": "$A </s>"}
PLANS = {"plain": {}, "split": small.SPLIT}
# A family, its data, and attributes of its class.
OBJECTIVES = [
    ("bert", "texts", {}),
    ("t5", "texts", {}),
    ("t5", "pairs", {"CORRUPTION_RATE": 0.0}),
]


def write_model(folder, kind):
    """A small model with a tokenizer of words."""
    few = {"t5": {"eos_token_id": 1, "num_layers": 1, "num_decoder_layers": 1}, "bert": {}}[kind]
    values = small.KINDS[kind] | few
    small.write(folder / "in", values, small.tensors_of(values))
    words = {word: number for number, word in enumerate([*SPECIAL[kind], *WORDS])}
    unknown = next(word for word in words if "unk" in word.lower())
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=unknown))
    found.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    found.add_special_tokens(SPECIAL[kind])
    special = [(word, words[word]) for word in TEMPLATES[kind].split() if word != "$A"]
    found.post_processor = tokenizers.processors.TemplateProcessing(
        single=TEMPLATES[kind], special_tokens=special
    )
    found.save(str(folder / "in" / "tokenizer.json"))
    transfer.import_weights(str(folder / "in"), str(folder / "run"))
    rng = np.random.default_rng(5)

    def words_of(most):
        return " ".join(rng.choice(WORDS, rng.integers(2, most)))

    texts = [{"text": words_of(20)} for _ in range(12)]
    pairs = [{"prompt": words_of(6), "completion": words_of(4)} for _ in range(12)]
    for name, rows in (("texts", texts), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("bert"), "bert")


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("t5"), "t5")


def config_of(cls, folder, data, **attributes):
    config = cls()
    config.LOGDIR, config.TRAIN_DATA, config.HELDOUT_DATA = f"{folder}/run", data, data
    config.OPTIMIZER, config.LEARNING_RATE = "sgd", 0.1
    config.BATCH_SIZE, config.SEQUENCE_LENGTH = 4, 16
    for name, value in attributes.items():
        setattr(config, name, value)
    return config


def model_of(cls, folder, plan, data, **attributes):
    config = config_of(cls, folder, data, **attributes)
    return RegisteredModel(config, "Model", PLANS[plan], plain=plan == "plain")


def losses_of(model, folder, tmp_path):
    """The losses of two steps, and their batches."""
    options = Options(logdir=str(tmp_path), steps=2)
    trainer = Trainer(model, options, f"{folder}/run/ckpt-0", keeps_place=False)
    found = []
    for _ in range(2):
        loss = trainer.train_step()["loss"]
        found.append((loss, {name: t.numpy() for name, t in trainer.batch.items()}))
    return found


def assert_right(family, batch):
    assert (batch["weights"] > 0).any()
    if family == "t5":
        # A target starts with the pad.
        assert (batch["ids"][batch["segment_pos"] == 0] == 0).all()
        assert (batch["source_segment_ids"].max(1) == batch["segment_ids"].max(1)).all()
    else:
        assert (batch["ids"] == SPECIAL["bert"].index("[MASK]")).any()


# Spans and pairs are of one model.
LEARNED = [OBJECTIVES[0], pytest.param(*OBJECTIVES[1], marks=pytest.mark.exhaustive), OBJECTIVES[2]]


@pytest.mark.parametrize(("family", "data", "attributes"), LEARNED)
def test_losses_are_those_of_the_plain_model(request, tmp_path, family, data, attributes):
    folder = request.getfixturevalue(family)
    cls = {"bert": params.Bert, "t5": params.T5}[family]
    found = {}
    for plan in PLANS:
        model = model_of(cls, folder, plan, f"{folder}/{data}.jsonl", **attributes)
        found[plan] = losses_of(model, folder, tmp_path / plan)
    for (loss, batch), (wanted, plain) in zip(found["split"], found["plain"], strict=True):
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
        assert batch.keys() == plain.keys()
        for name, values in batch.items():
            np.testing.assert_array_equal(values, plain[name], err_msg=name)
        assert_right(family, batch)
    assert found["split"][0][0] != found["split"][1][0]


@pytest.mark.parametrize(("family", "data", "attributes"), OBJECTIVES)
def test_tokens_of_a_microbatch_are_those_of_batches(request, family, data, attributes):
    """They were `SEQUENCE_LENGTH`, longer than the model's rows, and without targets."""
    folder, cls = request.getfixturevalue(family), {"bert": params.Bert, "t5": params.T5}[family]
    config = config_of(cls, folder, f"{folder}/{data}.jsonl", SEQUENCE_LENGTH=32, **attributes)
    (batch,) = config.Train().dataset().take(1)
    tokens = sum(tf.size(batch[name]) for name in ("ids", "source_ids") if name in batch)
    assert_right(family, {name: value.numpy() for name, value in batch.items()})
    rows, length = batch_sizes(config)
    assert (rows, rows * length) == (4, int(tokens))
    assert length == 16 if family == "bert" else length > 32


def test_predictions_are_tokens_at_masked_places(bert):
    found = {}
    for plan in PLANS:
        model = model_of(params.Bert, bert, plan, f"{bert}/texts.jsonl")
        predictor = Predictor(model, f"{bert}/run/ckpt-0")
        found[plan] = list(predictor.examples())
    batches: Any = model.heldout_data()
    labels = np.concatenate([np.where(b["weights"] > 0, b["labels"], -1) for b in batches])
    assert len(found["plain"]) == len(labels) > 4
    for split, plain, wanted in zip(found["split"], found["plain"], labels, strict=True):
        np.testing.assert_array_equal(split["predicted"], plain["predicted"])
        np.testing.assert_array_equal(plain["labels"], wanted)
        assert ((plain["predicted"] >= 0) == (wanted >= 0)).all()


def test_commands_predict_masked_tokens_and_continue_a_source(bert, t5):
    data = [f"--heldout_data={bert}/texts.jsonl", "--sequence_length=16"]
    lines = program.done("predict", f"--logdir={bert}/run", *data).splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) > 4 and all(len(row["predicted"]) == 16 for row in rows)
    told = program.refused("decode", f"--logdir={bert}/run", "--prompt=the cat")
    assert "pipemesh predict writes its predictions" in told
    words = [f"--logdir={t5}/run", "--max_tokens=6", "--format=json", "--prompt=the cat sat"]
    split = ["--mesh_shape=layers:2;model:2", f"--layout={PLANS['split']['layout']}"]
    assert 1 <= len(json.loads(program.done("decode", *words, *split))["tokens"]) <= 6
    told = program.refused("score", f"--logdir={t5}/run", "--prompt=the cat")
    assert "is of an encoder-decoder; use pipemesh decode" in told
