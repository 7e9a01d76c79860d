"""Models of `transformers`, taken in from their files: logits, tokens and a step are theirs."""

import dataclasses
import functools
import itertools
import shutil
import types

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file

from models.pretrained import config as configs
from models.pretrained import params, transfer
from models.pretrained.safetensors_file import TensorFiles, find
from pipemesh.decoding import Decoder, Generator, Sampler, SourcePrompt
from pipemesh.layers import DatasetInput
from pipemesh.training.evaluation import restored
from pipemesh.training.registered import RegisteredModel
from pipemesh.training.run import Options
from pipemesh.training.trainer import Trainer
from tests.models.pretrained import small

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("eagerly"),
    # torch looks for GPUs at the first gradient.
    pytest.mark.filterwarnings("ignore:CUDA initialization"),
]

LENGTH, VOCAB, RATE = 12, small.GPT2["vocab_size"], 0.5
# `model` stands for the dims of weights that a family has.
PLANS = [
    {"mesh": "layers:2;model:2", "layout": "model", "num_microbatches": "2"},
    {
        "mesh": "layers:2;data:2;model:2",
        "layout": "batch:data;model",
        "num_microbatches": "2",
        "schedule": "zb_h1",
    },
    {
        "mesh": "layers:2;model:2",
        "layout": "model",
        "num_microbatches": "4",
        "schedule": "gpipe",
    },
    {"mesh": "layers:1", "layout": "", "num_microbatches": "1"},
    {"mesh": "layers:2;data:2", "layout": "batch:data;embed:data", "num_microbatches": "2"},
    {
        "mesh": "layers:2;model:2",
        "layout": "length:model;model",
        "num_microbatches": "2",
        "remat": "full",
    },
]
IDS = np.random.default_rng(3).integers(0, VOCAB, [8, LENGTH + 1])
SOURCE = np.random.default_rng(4).integers(0, VOCAB, [8, LENGTH + 2])
# The class of `transformers`, our inputs beside those of a decoder, and theirs, by kind of model.
AUTO = {
    "decoder": "AutoModelForCausalLM",
    "encoder": "AutoModelForMaskedLM",
    "encoder_decoder": "AutoModelForSeq2SeqLM",
}
OURS = {
    "decoder": {},
    "encoder": {"token_types": IDS[:, 1:] % small.BERT["type_vocab_size"]},
    "encoder_decoder": {
        "source_ids": SOURCE,
        "source_segment_ids": np.ones_like(SOURCE),
        "source_segment_pos": np.tile(np.arange(SOURCE.shape[1]), [len(SOURCE), 1]),
    },
}
PROMPTS = [IDS[i, :number].tolist() for i, number in enumerate((3, 7, 1, 5))]
MORE = 40


def theirs_of(kind, rows=slice(None)):
    """The arguments of their model for the one batch."""
    if kind == "encoder_decoder":
        return {"input_ids": SOURCE[rows], "decoder_input_ids": IDS[rows, :-1]}
    types = {"token_type_ids": OURS[kind]["token_types"][rows]} if kind == "encoder" else {}
    return {"input_ids": IDS[rows, :-1], **types}


def batches(kind):
    """The one batch that is trained on."""
    shape = [len(IDS), LENGTH]
    values = {
        "ids": IDS[:, :-1].astype(np.int32),
        "labels": IDS[:, 1:].astype(np.int32),
        "weights": np.ones(shape, np.float32),
        "segment_ids": np.ones(shape, np.int32),
        "segment_pos": np.tile(np.arange(LENGTH, dtype=np.int32), [len(IDS), 1]),
    }
    values |= {name: value.astype(np.int32) for name, value in OURS[kind].items()}
    return tf.data.Dataset.from_tensors(values)


class OneBatch:
    """Trains by plain gradients on the one batch."""

    OPTIMIZER, LEARNING_RATE, CLIP_GRADIENT_NORM = "sgd", RATE, 0.0
    BATCH_SIZE, SEQUENCE_LENGTH = IDS.shape[0], LENGTH
    LOGDIR: str

    def Train(self):
        kind = configs.of_folder(self.LOGDIR).kind
        dataset = functools.partial(batches, kind)
        return DatasetInput.Params().Set(name="Train", dataset=dataset)


def in_turn():
    """Families and plans, each family with another plan; the rest is `exhaustive`."""
    for number, (kind, plan) in enumerate(itertools.product(small.KINDS, range(len(PLANS)))):
        turn = number // len(PLANS) % len(PLANS)
        marks = () if plan == turn else pytest.mark.exhaustive
        yield pytest.param((kind, plan), marks=marks, id=f"{kind}-{plan}")


def plan_of(model, number):
    """A plan with the dims that the model has, in place of `model`."""
    dims = ["heads", "vocab", "expert_ff" if model.num_experts else "d_ff"]
    dims += ["kv_heads"] if model.num_kv_heads < model.num_heads else []
    plan = PLANS[number]
    rules = [rule for rule in plan["layout"].split(";") if rule and rule != "model"]
    if plan["layout"].endswith("model"):
        rules += [f"{dim}:model" for dim in dims]
    return plan | {"layout": ";".join(rules)}


@pytest.fixture(scope="module", params=in_turn())
def case(request, tmp_path_factory):
    """A model of theirs, and the folder of a training that begins with its weights."""
    reason = "the models to compare with are not installed: pip install -e '.[dev,peers]'"
    torch = pytest.importorskip("torch", reason=reason)
    package = pytest.importorskip("transformers", reason=reason)
    kind, plan = request.param
    longest = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    values = small.KINDS[kind]
    wanted = configs.of_values(values)
    values = values if wanted.relative_buckets else values | {longest: 64}
    torch.manual_seed(7)
    auto = getattr(package, AUTO[wanted.kind])
    model = auto.from_config(package.AutoConfig.for_model(**values)).eval()
    model.set_attn_implementation("eager")
    if wanted.kind == "encoder_decoder" and not wanted.tied:
        # Of a config alone, newer releases tie the logits; of such files they do not.
        model.lm_head.weight = torch.nn.Parameter(0.3 * model.lm_head.weight.detach())
    with torch.no_grad():
        for weight in model.parameters():
            # Away from zeros and ones, and large enough for logits that differ.
            weight.add_(0.3 * torch.randn(weight.shape))
    folder = tmp_path_factory.mktemp("peer")
    # As the package writes it; of one kind in several files.
    size = "4KB" if kind == "llama" else "1GB"
    model.save_pretrained(folder / "theirs", max_shard_size=size)
    assert (folder / "theirs" / "model.safetensors").exists() == (size == "1GB")
    transfer.import_weights(str(folder / "theirs"), str(folder / "run"))
    # What the package wrote says what it was asked for.
    wanted = configs.of_values(values)
    there = configs.read(str(folder / "run" / "config.json"))
    rest = {"eos": (), "notes": ()}
    assert dataclasses.replace(there, bos=None, **rest) == dataclasses.replace(wanted, **rest)
    of_family = getattr(params, params.MODELS[wanted.model_type].rpartition(".")[2])
    config = type("Model", (OneBatch, of_family), {})()
    config.LOGDIR = str(folder / "run")
    subject = RegisteredModel(config, "Model", plan_of(wanted, plan))
    return types.SimpleNamespace(
        torch=torch,
        package=package,
        model=model,
        folder=folder,
        subject=subject,
        kind=type(config),
        plan=plan_of(wanted, plan),
        auto=auto,
        of=wanted.kind,
    )


def logits_of(case, model, rows=slice(None)):
    """Their logits of the one batch."""
    inputs = {n: case.torch.tensor(value) for n, value in theirs_of(case.of, rows).items()}
    return model(**inputs, **({} if case.of == "encoder" else {"use_cache": False})).logits


@pytest.fixture
def trained(case):
    return restored(case.subject, str(case.folder / "run" / "ckpt-0"))


def test_log_probabilities_of_all_tokens_are_theirs(case, trained):
    """Our model has no logits but those of labels, so each row is asked for each label."""
    (batch,) = batches(case.of)
    row = {name: tf.repeat(value[:1], VOCAB, 0) for name, value in batch.items()}
    row["labels"] = tf.tile(tf.range(VOCAB)[:, None], [1, LENGTH])

    @tf.function(autograph=False)
    def xent(batch):
        return trained.evaluate(batch, lambda metrics, per_example: per_example["xent"])

    with trained.cluster(do_eval=True):
        found = -xent(row).numpy().T
    torch = case.torch
    with torch.no_grad():
        logits = logits_of(case, case.model, slice(1))[0]
    wanted = torch.log_softmax(logits, -1).numpy()
    assert np.std(wanted) > 0.5
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def test_the_most_likely_tokens_are_theirs(case, trained):
    if case.of == "encoder":
        pytest.skip("an encoder has no next token")
    has_source = case.of == "encoder_decoder"
    # Twice T5's greatest distance; their model computes all tokens again for each.
    more = 20 if has_source else MORE
    sizes = {"length": 8 + more, "vocab_size": VOCAB}
    generator = Generator(
        trained.task,
        trained.pipelines[0],
        lambda: trained.cluster(do_eval=True),
        sizes["length"],
        Sampler(),
    )
    most = max(map(len, PROMPTS)) if has_source else None
    decoder = Decoder(generator, rows=1, groups=2, source_length=most, **sizes)
    prompts = [SourcePrompt(prompt, [0]) for prompt in PROMPTS] if has_source else PROMPTS
    found = {each.number: list(each.tokens) for each in decoder.generate(prompts, more)}
    torch = case.torch
    for number, prompt in enumerate(PROMPTS):
        given = torch.tensor([prompt])
        said = case.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=more,
            pad_token_id=0,
            # Their cache has no more layers than the encoder.
            **({"decoder_start_token_id": 0, "use_cache": False} if has_source else {}),
        )
        begin = 1 if has_source else len(prompt)
        assert found[number] == said[0, begin:].tolist(), number
    assert len({tuple(each) for each in found.values()}) > 1


def test_weights_go_back_bit_by_bit(case):
    """Before any step, the files have the tensors that came."""
    transfer.export_weights(str(case.folder / "run" / "ckpt-0"), str(case.folder / "same"))
    theirs, ours = (TensorFiles(find(str(case.folder / name))) for name in ("theirs", "same"))
    with theirs, ours:
        assert theirs.names == ours.names
        for name in theirs.names:
            np.testing.assert_array_equal(ours.read(name), theirs.read(name), err_msg=name)


def test_a_step_is_theirs_and_goes_back_to_them(case):
    torch, run = case.torch, case.folder / "run"
    trainer = Trainer(case.subject, Options(logdir=str(run), steps=1), str(run / "ckpt-0"), True)
    assert not trainer.keeps_place
    loss = trainer.train_step()["loss"]
    path = trainer.save()
    assert trainer.step == 1

    model = case.model
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    logits = logits_of(case, model)
    wanted = torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCAB), torch.tensor(IDS[:, 1:]).reshape(-1)
    )
    wanted.backward()
    np.testing.assert_allclose(loss, wanted.item(), rtol=0, atol=1e-4)

    transfer.export_weights(path, str(case.folder / "tuned"))
    tuned = case.auto.from_pretrained(case.folder / "tuned")
    found = dict(tuned.named_parameters())
    assert found.keys() == before.keys()
    for name, weight in model.named_parameters():
        step = RATE * weight.grad
        # What is added to all keys of a head changes no weight of attention without rotations.
        of_keys = name.endswith(("self_attn.k_proj.bias", "self.key.bias"))
        assert float(step.abs().max()) > 1e-3 or of_keys, name
        np.testing.assert_allclose(
            found[name].detach().numpy(),
            (before[name] - step).numpy(),
            rtol=0,
            atol=1e-4,
            err_msg=name,
        )


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_step_of_adapters_is_that_of_peft(case):
    """The first step moves `b` alone, so both take two."""
    reason = "the package to compare with is not installed: pip install -e '.[dev,peers]'"
    peft = pytest.importorskip("peft", reason=reason)
    torch, run = case.torch, case.folder / "adapted"
    run.mkdir()
    for name in ("config.json", *(file.name for file in (case.folder / "run").glob("ckpt-0.*"))):
        shutil.copy(case.folder / "run" / name, run)
    config = case.kind()
    config.LOGDIR, config.LORA_RANK, config.LORA_TARGETS = str(run), 2, "/w_"
    subject = RegisteredModel(config, "Model", case.plan)
    trainer = Trainer(subject, Options(logdir=str(run), steps=3), str(run / "ckpt-0"), True)
    trainer.train_step()
    transfer.export_weights(trainer.save(), str(case.folder / "first"))

    def loaded(folder, **options):
        base = case.auto.from_pretrained(case.folder / "theirs")
        base.set_attn_implementation("eager")
        return peft.PeftModel.from_pretrained(
            base, case.folder / folder, torch_device="cpu", **options
        )

    model = loaded("first", is_trainable=True).eval()
    loss = trainer.train_step()["loss"]
    path = trainer.save()

    logits = logits_of(case, model)
    wanted = torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCAB), torch.tensor(IDS[:, 1:]).reshape(-1)
    )
    np.testing.assert_allclose(loss, wanted.item(), rtol=0, atol=1e-4)
    wanted.backward()
    weights = {n: w for n, w in model.named_parameters() if w.requires_grad}
    transfer.export_weights(path, str(case.folder / "second"))
    found = load_file(case.folder / "second" / "adapter_model.safetensors")
    assert {name.replace(".default", "") for name in weights} == found.keys()
    for name, weight in weights.items():
        step = (RATE * weight.grad).numpy()
        there = found[name.replace(".default", "")]
        # Blocks of zeros, where several weights here are one there, are not trained here.
        moved = np.where(there == 0, 0, step)
        assert np.abs(moved).max() > 1e-3, name
        np.testing.assert_allclose(
            there, weight.detach().numpy() - moved, rtol=1e-4, atol=1e-4, err_msg=name
        )
    merged = case.folder / "merged"
    transfer.export_weights(path, str(merged), merged=True)
    whole = case.auto.from_pretrained(merged)
    theirs = loaded("second").eval()
    with torch.no_grad():
        both = [logits_of(case, each).numpy() for each in (whole.eval(), theirs)]
    np.testing.assert_allclose(*both, rtol=0, atol=1e-4)
