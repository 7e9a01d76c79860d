"""Documents reach a training: by packing, mixture and masks, equal under every plan."""

import json

import numpy as np
import pytest
import tensorflow as tf

from models.pretrained import params, transfer
from models.pretrained.text import batches_of
from pipemesh.commands import runs
from pipemesh.commands.flags import FlagError
from pipemesh.errors import DataError, TrainingError
from pipemesh.training.evaluation import evaluate
from pipemesh.training.registered import RegisteredModel
from pipemesh.training.run import Options
from pipemesh.training.trainer import Trainer
from tests.commands import program
from tests.models.pretrained import small

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("eagerly")]

TEMPLATE = """
{%- for message in messages %}
    {{- '[BOS] ' if message.role == 'user' else ' the ' }}{{ message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ ' the ' }}{% endif %}
"""
PLANS = {
    "plain": {},
    "split": small.SPLIT,
    "pipeline": {"mesh": "layers:2", "schedule": "zb_h1", "num_microbatches": "2"},
    "slices": {"mesh": "layers:2", "schedule": "seq1f1b:2", "num_microbatches": "2"},
}
WORDS = small.WORDS[2:]
LENGTH = 8


class Model(params.Gpt2):
    # Adam would enlarge round-off where a gradient is zero: biases of keys.
    OPTIMIZER, LEARNING_RATE = "sgd", 0.3
    BATCH_SIZE, SEQUENCE_LENGTH = 8, LENGTH


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights with dropout in training, and three files of documents."""
    folder = tmp_path_factory.mktemp("data")
    values = small.GPT2 | {"vocab_size": len(small.WORDS), "resid_pdrop": 0.2, "embd_pdrop": 0.2}
    small.write(folder / "in", values, small.tensors_of(values))
    small.write_tokenizer(folder / "in")
    (folder / "in" / "chat_template.jinja").write_text(TEMPLATE)
    transfer.import_weights(str(folder / "in"), str(folder / "run"))
    rng = np.random.default_rng(5)

    def words(most):
        return " ".join(rng.choice(WORDS, rng.integers(1, most)))

    def chat():
        roles = ["user", "assistant"] * rng.integers(1, 3)
        return {"messages": [{"role": role, "content": words(4)} for role in roles]}

    rows = {
        "text": [{"text": words(20)} for _ in range(15)],
        "pairs": [{"prompt": words(4) + " ", "completion": words(4)} for _ in range(20)],
        "chats": [chat() for _ in range(20)],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def model_of(folder, plan, train="", heldout=None, packing="auto", buckets=""):
    config = Model()
    config.LOGDIR, config.PACKING, config.BUCKETS = str(folder / "run"), packing, buckets
    config.TRAIN_DATA, config.HELDOUT_DATA = train or f"{folder}/text.jsonl", heldout
    values = PLANS[plan]
    return RegisteredModel(config, "Model", values, plain=plan == "plain")


def trained(folder, plan, logdir, until, restore=None):
    """The batches and losses of steps, and the checkpoints after the third and after the last."""
    mixture = f"{folder}/text.jsonl*0.5,{folder}/pairs.jsonl*0.2,{folder}/chats.jsonl*0.3"
    logdir.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (logdir / name).write_bytes((folder / "run" / name).read_bytes())
    options = Options(logdir=str(logdir), steps=until)
    begin = restore or str(folder / "run" / "ckpt-0")
    subject = model_of(folder, plan, mixture)
    trainer = Trainer(subject, options, restore=begin, keeps_place=restore is not None)
    assert trainer.keeps_place == (restore is not None)
    steps, paths = [], []
    while trainer.step < until:
        loss = trainer.train_step()["loss"]
        batch = {name: value.numpy().tolist() for name, value in trainer.batch.items()}
        steps.append((batch, loss))
        if trainer.step in (3, until):
            paths.append(trainer.save())
    return steps, paths


def weights_at(path, to):
    from safetensors.numpy import load_file

    transfer.export_weights(path, str(to))
    return load_file(str(to / "model.safetensors"))


def test_under_another_plan_it_goes_on_with_the_same_rows(folder, tmp_path):
    wanted, (path, last) = trained(folder, "plain", tmp_path / "plain", 7)
    weights = weights_at(last, tmp_path / "wanted")
    assert len({str(batch["ids"]) for batch, _ in wanted}) == 7
    assert {0.0, 1.0} == {w for batch, _ in wanted for row in batch["weights"] for w in row}
    # What the trainer had read ahead after the third step is not in its checkpoint.
    rest, (path,) = trained(folder, "split", tmp_path / "b", 7, restore=path)
    for (batch, loss), (own, own_loss) in zip(wanted[3:], rest, strict=True):
        assert batch == own
        np.testing.assert_allclose(own_loss, loss, rtol=1e-5)
    found = weights_at(path, tmp_path / "found")
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-5, err_msg=name)


def test_batches_in_buckets_are_those_of_one_length_without_their_padding(folder, tmp_path):
    data = f"{folder}/text.jsonl"
    losses, seen = {}, set()
    for plan in ("plain", "split"):
        subject = model_of(folder, plan, data, packing="single", buckets="5")
        options = Options(logdir=str(tmp_path / plan), steps=4)
        (tmp_path / plan).mkdir()
        trainer = Trainer(subject, options, restore=str(folder / "run" / "ckpt-0"))
        losses[plan] = []
        for _ in range(4):
            losses[plan].append(trainer.train_step()["loss"])
            seen.add(trainer.batch["ids"].shape[1])
            # Padding changes nothing, but for the masks of dropout.
            wide = {
                name: tf.pad(value, [[0, 0], [0, LENGTH - value.shape[1]]])
                for name, value in trainer.batch.items()
            }
            scores = [trainer.evaluate([batch]).judged for batch in (trainer.batch, wide)]
            np.testing.assert_allclose(*scores, rtol=1e-5)
        # One graph a length.
        assert trainer._train.experimental_get_tracing_count() == 2
    assert seen == {5, LENGTH}
    np.testing.assert_allclose(losses["plain"], losses["split"], rtol=1e-5)
    for more in ({"steps_per_call": 2}, {"trace_schedule": True}):
        options = Options(logdir=str(tmp_path / "plain"), steps=6, **more)
        with pytest.raises(TrainingError, match="batches in buckets differ"):
            Trainer(subject, options, restore=str(folder / "run" / "ckpt-0"))


def test_what_a_plan_cannot_do_for_a_bucket_is_told_before_the_first_step(folder, tmp_path):
    subject = model_of(folder, "slices", f"{folder}/pairs.jsonl", packing="single", buckets="5")
    options = Options(logdir=str(tmp_path), steps=6)
    trainer = Trainer(subject, options, restore=str(folder / "run" / "ckpt-0"))
    told = r"batches of \[8, 5\] tokens \(--buckets\): .* sequences of 5 positions do not divide"
    with pytest.raises(TrainingError, match=told):
        trainer.train_step()
    assert trainer.step == 0


def test_documents_in_a_row_do_not_see_each_other(folder):
    path, data = str(folder / "run" / "ckpt-0"), f"{folder}/pairs.jsonl,{folder}/chats.jsonl"
    losses, rows = [], []
    for plan, packing in (("pipeline", "whole"), ("plain", "single")):
        model = model_of(folder, plan, heldout=data, packing=packing)
        counts = batches_of(data, f"{folder}/run", LENGTH, 8, packing).counts()
        rows.append(sum(each.rows for each in counts))
        losses.append(evaluate(model, path)[1].sums["loss"])
    assert rows[0] < 0.8 * rows[1] and rows[1] == 40
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_flags_name_the_data_whose_changes_are_noticed(folder, tmp_path):
    logdir, mix = tmp_path / "run", tmp_path / "mix.toml"
    transfer.import_weights(str(folder / "in"), str(logdir))
    chats, text = f"{folder}/chats.jsonl", f"{folder}/text.jsonl"
    mix.write_text(f'[[source]]\npath = "{chats}"\nweight = 2\n[[source]]\npath = "{text}"\n')
    flags = [f"--logdir={logdir}", f"--train_data={mix}", f"--heldout_data={folder}/pairs.jsonl"]
    flags += ["--batch_size=2", "--num_microbatches=2", "--sequence_length=8"]
    out = program.done("train", *flags, "--packing=whole", "--steps=2", "--save_every=2")
    assert "chats.jsonl: 20 documents, " in out and "of them predicted, in " in out
    assert "evaluation while training: all of the held-out data, 6 batches" in out
    lines = [json.loads(line) for line in (logdir / "record.jsonl").read_text().splitlines()]
    chat_counts, text_counts = lines[0]["data"]
    assert chat_counts["documents"] == 20 and text_counts["source"] == text
    assert text_counts["cut"] == 9 and text_counts["documents"] == 15
    assert "\nheld-out data: " in out and lines[0]["heldout"][0]["documents"] == 20
    template = logdir / "chat_template.jinja"
    template.write_text(TEMPLATE.replace("the", "mat"))
    out = program.done("train", f"--logdir={logdir}", "--steps=3")
    assert f"going on from {logdir}/ckpt-2" in out
    # Nothing else, neither the mixture nor its files.
    (told,) = (line for line in out.splitlines() if line.startswith("changed since"))
    assert told.startswith("changed since the checkpoint: input.chat_template.jinja ")
    assert "the data is read from its beginning" in out
    # Missing data of the training hinder no evaluation.
    mix.unlink()
    out = program.done("evaluate", f"--logdir={logdir}", f"--heldout_data={chats}")
    assert "step 3: loss " in out and "held-out data: " in out and "chats.jsonl: 20 doc" in out
    # Stages are cut otherwise, for the model's own batch.
    assert program.done("decode", f"--logdir={logdir}", "--prompt=the", "--max_tokens=1")
    words = ["evaluate", f"--logdir={logdir}", "--train_data=a"]
    ((_, _, err),) = program.without_tensorflow(words)
    assert err == "error: --train_data is for training; leave it out\n"
    (folder / "wrong.jsonl").write_text('{"text": "the"}\n{"txt": "the"}\n')
    wrong = model_of(folder, "plain", f"{folder}/wrong.jsonl")
    with pytest.raises(DataError, match=r"wrong\.jsonl', line 2 has none of the fields text, pro"):
        wrong.train_data(0)


def test_models_with_data_of_their_own_take_no_other(tmp_path):
    words = ["--model=models.digits.params.DigitsPlain", f"--logdir={tmp_path}/run"]
    with pytest.raises(FlagError, match=r"--train_data=a: .*Plain has no attribute TRAIN_DATA"):
        runs.train(["train", *words, "--train_data=a"])
