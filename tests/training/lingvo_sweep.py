"""Tries every task class of lingvo that can be made without its data.

    python -m tests.training.lingvo_sweep [PART OF A NAME...]

Each is made as small as it can be, trained for three steps by batches that are drawn, judged, and
asked for its predictions. The table that this prints stands in `pipemesh/training/README.md`.
Fails if lingvo has a task that is not named here, or one that should train does not.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip

import importlib
import inspect
import logging
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import lingvo
import numpy as np
import tensorflow as tf
from absl import flags
from lingvo.core import (
    base_input_generator,
    base_model,
    base_model_params,
    distillation_task,
    gshard_builder,
    layers,
    py_utils,
    trainer_test_utils,
)

from pipemesh.errors import PipemeshError
from pipemesh.training import Options, Trainer
from pipemesh.training.evaluation import Predictor, evaluate
from pipemesh.training.registered import RegisteredModel

ROWS, LENGTH, WORDS, WIDTH = 4, 6, 16, 4

_NO_TASKS = ("__init__.py", "test_utils.py")
# What a process is told to try, and what it says of it; its time.
_ALONE, _SECONDS = "alone:", 150
# Those that need more than batches of their shape.
_NEEDS = {
    "base_model.BaseTask": "abstract",
    "classifier.BaseClassifier": "abstract",
    "model.MTBaseModel": "abstract",
    "point_detector.PointDetectorBase": "abstract",
    "starnet.ModelBase": "abstract",
    "model.PackedBatchMajorLanguageModel": "no layer of lingvo takes its segment_ids",
    "model.RNMTModel": "ends the process by a memory error",
    "model.HybridModel": "ends the process by a memory error",
    "gshard_builder.LifelongUniTransformer": "needs experts that were trained before",
    "starnet.ModelV1": "needs laser scans with anchors, as its preprocessors make them",
    "starnet.ModelV2": "needs laser scans with anchors, as its preprocessors make them",
    "pillars.ModelV1": "needs laser scans with anchors, as its preprocessors make them",
    "pillars_anchor_free.ModelV1": "needs laser scans, as its preprocessors make them",
    "deep_fusion.DeepFusionModel": "needs laser scans and camera images",
}


class Given(base_input_generator.BaseSequenceInputGenerator):
    """Batches that a function makes."""

    @classmethod
    def Params(cls) -> Any:
        p = super().Params()
        p.Define("made", None, "Makes a batch.")
        p.Define("data_shape", [8, 8, 1], "Of an image.")
        p.tokenizer.vocab_size = WORDS
        return p.Set(
            bucket_upper_bound=[LENGTH],
            bucket_batch_limit=[ROWS],
            num_samples=ROWS,
            resettable=True,
        )

    def InfeedBatchSize(self) -> int:
        return ROWS

    def _InputBatch(self) -> Any:
        return self.params.made()


def ids(seed: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).integers(3, WORDS, [ROWS, LENGTH]), tf.int32)


def text() -> Any:
    """A batch of a language model."""
    ones = tf.ones([ROWS, LENGTH])
    return py_utils.NestedMap(
        ids=ids(0),
        labels=ids(1),
        paddings=0 * ones,
        weights=ones,
        word_count=tf.fill([ROWS], LENGTH),
    )


def columns() -> Any:
    """The same where all has two dims."""
    batch = text()
    batch.word_count = batch.word_count[:, None]
    return batch


def pairs() -> Any:
    """A batch of a translation model."""

    def side() -> Any:
        ones = tf.ones([ROWS, LENGTH])
        return py_utils.NestedMap(
            ids=ids(2), labels=ids(3), paddings=0 * ones, weights=ones, strs=tf.fill([ROWS], "a")
        )

    return py_utils.NestedMap(src=side(), tgt=side())


def crossed_pairs() -> Any:
    """A translation batch, another one, and the two crossed over."""
    batch = pairs()
    for side in (batch.src, batch.tgt):
        side.source_mask = tf.ones([ROWS, LENGTH])
    batch.other_src, batch.other_tgt = batch.src.copy(), batch.tgt.copy()
    return batch


def images() -> Any:
    data = tf.random.stateless_normal([ROWS, 8, 8, 1], [1, 2])
    return py_utils.NestedMap(data=data, raw=data, label=tf.range(ROWS), weight=tf.ones([ROWS]))


def flat_images() -> Any:
    batch = images()
    batch.data = tf.reshape(batch.data, [ROWS, 64])
    return batch


def embedded() -> Any:
    def side(seed: int) -> tf.Tensor:
        return tf.random.stateless_normal([ROWS, WIDTH], [seed, 2])

    order = tf.range(ROWS, dtype=tf.int64)
    return py_utils.NestedMap(x_input=side(1), x_ids=order, y_input=side(2), y_ids=order)


def sequences() -> Any:
    def side() -> Any:
        return py_utils.NestedMap(
            ids=ids(4),
            labels=ids(5),
            paddings=tf.zeros([ROWS, LENGTH]),
            segment_ids=tf.ones([ROWS, LENGTH], tf.int32),
            segment_pos=tf.tile(tf.range(LENGTH)[None], [ROWS, 1]),
        )

    return py_utils.NestedMap(src=side(), tgt=side())


def sequence() -> Any:
    return sequences().src


def numbers() -> Any:
    x = tf.random.stateless_normal([ROWS, 3], [1, 2])
    return py_utils.NestedMap(src_ids=x, tgt_ids=tf.reduce_sum(x, 1))


def _lenet(p: Any) -> Any:
    p.softmax.Set(input_dim=8, num_classes=10)
    return p.Set(filter_shapes=[(3, 3, 1, 4)], window_shapes=[(2, 2)], dropout_prob=0.1), images


def _features(p: Any) -> Any:
    p.softmax.Set(input_dim=8, num_classes=10)
    extract = layers.FCLayer.Params().Set(name="extract", input_dim=64, output_dim=8)
    return p.Set(extract=extract), flat_images


def _recurrent_lm(p: Any) -> Any:
    p.lm.vocab_size = WORDS
    p.lm.emb.Set(vocab_size=WORDS, embedding_dim=WIDTH)
    p.lm.rnns.num_layers = 2
    p.lm.rnns.cell_tpl.Set(num_output_nodes=WIDTH, num_input_nodes=WIDTH)
    p.lm.softmax.Set(input_dim=WIDTH, num_classes=WORDS)
    return p, text


def _static_lm(p: Any) -> Any:
    return _recurrent_lm(p)[0], columns


def _transformer_lm(p: Any) -> Any:
    from lingvo.tasks.lm import layers as lm_layers

    p.lm = lm_layers.GPipeTransformerLm.CommonParams(
        model_dim=WIDTH, hidden_dim=8, num_heads=2, num_layers=2, vocab_size=WORDS, splits=1
    )
    # What is packed is not trimmed to a length that is known later.
    return p.Set(packed_input=True), text


def _transformer_encoder(p: Any) -> None:
    p.Set(model_dim=WIDTH)
    p.token_emb.Set(vocab_size=WORDS, embedding_dim=WIDTH, max_num_shards=1)
    p.position_emb.embedding_dim = WIDTH
    stack = p.transformer_stack
    stack.Set(model_dim=WIDTH, num_transformer_layers=2)
    stack.transformer_tpl.tr_atten_tpl.num_attention_heads = 2
    stack.transformer_tpl.tr_fflayer_tpl.hidden_dim = 5


def _transformer_decoder(p: Any) -> None:
    p.Set(source_dim=WIDTH, model_dim=WIDTH, num_trans_layers=2, target_seq_len=LENGTH)
    p.token_emb.Set(vocab_size=WORDS, embedding_dim=WIDTH, max_num_shards=1)
    p.position_emb.embedding_dim = WIDTH
    p.trans_tpl.source_dim = WIDTH
    p.trans_tpl.tr_atten_tpl.Set(source_dim=WIDTH, num_attention_heads=2)
    p.trans_tpl.tr_fflayer_tpl.Set(input_dim=WIDTH, hidden_dim=8)
    p.softmax.Set(num_classes=WORDS, num_shards=1)


def _transformer(p: Any) -> Any:
    _transformer_encoder(p.encoder)
    _transformer_decoder(p.decoder)
    return p, pairs


def _insertion(p: Any) -> Any:
    from lingvo.tasks.mt import decoder

    p.decoder = decoder.InsertionDecoder.Params()
    return p.Set(random_seed=1), pairs


def _crossed(p: Any) -> Any:
    from lingvo.tasks.mt import decoder, encoder

    p.encoder = encoder.TransformerXEncoder.Params()
    p.decoder = decoder.TransformerXDecoder.Params()
    _transformer_encoder(p.encoder)
    _transformer_decoder(p.decoder)
    p.decoder.label_smoothing = layers.UniformLabelSmoother.Params().Set(uncertainty=0.1)
    p.decoder.per_word_avg_loss = True
    return p, crossed_pairs


def _speech(p: Any) -> Any:
    from lingvo.tasks.asr import model_test_input_generator

    shape = [2, 16, 8, 3]
    p.decoder.target_seq_len = 5
    p.encoder.input_shape = shape
    found = model_test_input_generator.TestInputGenerator.Params().Set(
        target_max_length=5,
        source_shape=shape,
        target_shape=[2, 5],
        num_samples=2,
        resettable=True,
        bucket_upper_bound=[20],
        bucket_batch_limit=[2],
    )
    return p, found


def _dual(p: Any) -> Any:
    from lingvo.tasks.milan import dual_encoder

    def side(name: str) -> Any:
        return dual_encoder.EncoderConfig().Set(
            input_features=f"{name}_input",
            id_feature=f"{name}_ids",
            encoder=layers.FCLayer.Params().Set(input_dim=WIDTH, output_dim=WIDTH),
            output_dim=WIDTH,
        )

    p.dual_encoder.Set(
        encoder_configs={name: side(name) for name in "xy"},
        loss_weights={("x", "y"): 0.5, ("y", "x"): 0.5},
        joint_embedding_dim=WIDTH,
        label_fn=lambda _: tf.eye(ROWS, dtype=tf.int32),
    )
    return p, embedded


def _builder() -> Any:
    return gshard_builder.DenseBuilder.Params().Set(
        model_dim=WIDTH,
        attention_num_heads=2,
        attention_key_value_dim=2,
        attention_combine_dims=True,
        ff_dim=8,
        moe_hidden_dim=8,
        e_dim=2,
        num_groups=1,
        c_dim=2,
        num_devices=1,
        relative_attention_type="bias",
        relative_attention_num_buckets=4,
        relative_attention_max_distance=8,
        relative_attention_use_universal_1d_position=True,
        dtype=tf.float32,
    )


def _uni(p: Any) -> Any:
    p.Set(builder=_builder(), vocab_size=WORDS, sequence_length=LENGTH, num_transformer_layers=2)
    return p.Set(batch_size=ROWS, max_length=LENGTH, positional_embedding=False), sequences


def _bert(p: Any) -> Any:
    p.Set(builder=_builder(), vocab_size=WORDS, sequence_length=LENGTH, num_transformer_layers=2)
    return p.Set(batch_size=ROWS, max_length=LENGTH, mask_token_id=1), sequence


def _as_it_is(p: Any) -> Any:
    return p, numbers


class Distilled(distillation_task.DistillationTask):
    """The class is abstract but for its loss."""

    def ComputeDistillationLoss(self, theta: Any, predictions: Any, input_batch: Any) -> Any:
        error = tf.square(predictions.teacher - predictions.student)
        return {"loss": (tf.reduce_mean(error), tf.constant(float(ROWS)))}, {}


def _distilled(p: Any) -> Any:
    p.cls = Distilled
    for name in ("teacher", "student"):
        child = trainer_test_utils.IdentityRegressionTask.Params().Set(train=None, eval=None)
        p.Set(**{name: child.Set(weight_init_value=0.3 if name == "teacher" else 0.8)})
    return p, numbers


CASES: dict[str, Callable[[Any], Any]] = {
    "classifier.ModelV1": _lenet,
    "classifier.ModelV2": _features,
    "model.LanguageModel": _recurrent_lm,
    "model.FixedShapeInputLanguageModel": _static_lm,
    "model.BatchMajorLanguageModel": _transformer_lm,
    "model.TransformerModel": _transformer,
    "model.InsertionModel": _insertion,
    "model.TransformerXEnDecModel": _crossed,
    "model.AsrModel": _speech,
    "dual_encoder.MilanTask": _dual,
    "gshard_builder.UniTransformer": _uni,
    "gshard_builder.TunableUniTransformer": _uni,
    "gshard_builder.BertTransformer": _bert,
    "distillation_task.DistillationTask": _distilled,
    "trainer_test_utils.IdentityRegressionTask": _as_it_is,
}


def tasks() -> Iterator[tuple[str, Any]]:
    """All task classes of lingvo, by the names of module and class."""
    seen: set[type] = set()
    (folder,) = lingvo.__path__
    for package in ("core", "tasks"):
        # Some folders of tasks are no packages.
        for path in sorted(pathlib.Path(folder, package).rglob("*.py")):
            name = ".".join(path.relative_to(folder).with_suffix("").parts)
            # What imports none of these has no task; some of the others change global modes.
            if not re.search(r"base_model|import model|point_detector|starnet", path.read_text()):
                continue
            if "/tools/" in str(path) or path.name in _NO_TASKS:
                continue
            try:
                module = importlib.import_module(f"lingvo.{name}")
            except Exception as error:
                print(f"{name} cannot be imported: {error}", file=sys.stderr)
                continue
            for each in vars(module).values():
                is_own = inspect.isclass(each) and each.__module__ == module.__name__
                if is_own and issubclass(each, base_model.BaseTask) and each not in seen:
                    seen.add(each)
                    yield f"{name.rpartition('.')[2]}.{each.__name__}", each


def model_of(kind: Any, case: Callable[[Any], Any]) -> Any:
    """A registered model of a task class."""

    class Model(base_model_params.SingleTaskModelParams):
        def Train(self) -> Any:
            _, made = case(kind.Params())
            if callable(made) and not isinstance(made, py_utils.hyperparams.Params):
                return Given.Params().Set(name="given", made=made)
            return made.Set(name="given")

        def Test(self) -> Any:
            return self.Train()

        def Task(self) -> Any:
            p, _ = case(kind.Params())
            p.name = p.name or "task"
            if p.train.learner is None and not p.train.learning_rate:
                p.train.learning_rate = 0.01
            return p

    return Model()


def attempt(kind: Any, case: Callable[[Any], Any]) -> str:
    """The result for a task, in words."""
    tf.compat.v1.get_default_graph().lingvo_variable_store = None
    config, told = model_of(kind, case), "trains"
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(RegisteredModel(config, kind.__name__), Options(logdir=folder, steps=3))
        losses = [trainer.train_step()["loss"] for _ in range(3)]
        if not np.isfinite(losses).all():
            return f"losses are {losses}"
        path = trainer.save()
        try:
            evaluate(RegisteredModel(config, kind.__name__), path)
            told = "trains, is judged"
            next(Predictor(RegisteredModel(config, kind.__name__), path).examples())
        # Some of lingvo's tasks do not go without training.
        except (PipemeshError, AttributeError, ValueError) as error:
            what = "predict" if "judged" in told else "evaluate"
            return f"{told}; {what}: {' '.join(str(error).split())}"
    return f"{told}, predicts"


def alone(name: str) -> str:
    """The result for a task in a separate process, which it may end."""
    words = [sys.executable, "-m", "tests.training.lingvo_sweep", f"{_ALONE}{name}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no end within {_SECONDS} s"
    told = [line for line in done.stdout.splitlines() if line.startswith(_ALONE)]
    if told:
        return told[0].removeprefix(_ALONE)
    return f"the process ends with {done.returncode}"


def main(wanted: list[str]) -> int:
    """Prints the table; returns 1 if a task is unknown or does not train."""
    flags.FLAGS.mark_as_parsed()
    logging.disable(logging.WARNING)
    named = {f"{k.__module__.removeprefix('lingvo.')}.{k.__name__}": (n, k) for n, k in tasks()}
    py_utils.SetEagerMode(True)
    if wanted and wanted[0].startswith(_ALONE):
        short, kind = named[wanted[0].removeprefix(_ALONE)]
        try:
            told = attempt(kind, CASES[short])
        except Exception as error:
            told = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        print(f"{_ALONE}{told}", flush=True)
        return 0
    failed = False
    print("| task | |\n|---|---|")
    for name, (short, _) in named.items():
        if wanted and not any(each in name for each in wanted):
            continue
        told = _NEEDS.get(short) or _NEEDS.get(name)
        if told is None:
            told = alone(name) if short in CASES else "unknown"
            failed |= not told.startswith("trains")
        print(f"| `{name}` | {told} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
