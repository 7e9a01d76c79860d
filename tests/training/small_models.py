"""lingvo models that train in a second: a classifier of points, pipelined or not."""

import tensorflow as tf
from lingvo.core import (
    base_input_generator,
    base_layer,
    base_model,
    base_model_params,
    bn_layers,
    datasource,
    layers,
    learner,
    optimizer,
    py_utils,
    schedule,
    tshape,
)

from models.digits.params import DigitsPipelined
from pipemesh.layers import PartitionSequentialLayers, PipeliningLayer
from pipemesh.plan import Plan
from pipemesh.training.learning import Learning

BATCH, DIM = 8, 4


def points(seed, number):
    """Batches [x, y]; y is 1 where the values of x add up to more than 0."""

    def batch(index):
        x = tf.random.stateless_normal([BATCH, DIM], tf.stack([tf.cast(index, tf.int64), seed]))
        y = tf.cast(tf.reduce_sum(x, 1, keepdims=True) > 0, tf.float32)
        return py_utils.NestedMap(x=x, y=y)

    numbers = tf.data.Dataset.counter() if number is None else tf.data.Dataset.range(number)
    return numbers.map(batch)


class Source(datasource.TFDatasetSource):
    """The points."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("seed", 0, "Of the points.")
        p.Define("number", None, "Of the batches; None for no end.")
        p.Define("bad", None, "The batch that is not finite.")
        p.Define("rest", 0, "Rows of one more batch, at the end.")
        p.Define("stateful", False, "Whether an operation has state that no iterator has.")
        return p

    def GetDataset(self):
        p = self.params
        dataset = points(p.seed, p.number)
        if p.rest:
            last = points(p.seed, p.number + 1).skip(p.number)
            few = last.map(lambda batch: batch.Transform(lambda x: x[: p.rest]))
            dataset = dataset.concatenate(few)
        if p.bad is not None:

            def spoil(index, batch):
                batch.x = tf.where(tf.equal(index, p.bad), tf.constant(float("nan")), batch.x)
                return batch

            dataset = dataset.enumerate().map(spoil)
        if p.stateful:
            dataset = dataset.map(lambda batch: batch.Set(x=batch.x + tf.random.uniform([]))).map(
                lambda batch: batch
            )
        return dataset


class Pairs(Source):
    """The first two points of each batch."""

    def GetDataset(self):
        return super().GetDataset().map(lambda batch: batch.Transform(lambda x: x[:2]))


class Points(base_input_generator.BaseInputGenerator):
    """The points as lingvo's models take them."""

    @classmethod
    def Params(cls):
        p = super().Params().Set(name="points", batch_size=BATCH)
        p.Define("source", Source.Params(), "Where they come from.")
        return p

    def CreateDatasource(self):
        self.CreateChild("datasource", self.params.source)
        self.datasource.SetInputGenerator(self)


class Drawn(base_input_generator.BaseInputGenerator):
    """The points without a dataset, drawn when they are asked for."""

    def _InputBatch(self):
        x = tf.random.normal([BATCH, DIM])
        return py_utils.NestedMap(x=x, y=tf.cast(x[:, :1] > 0, tf.float32))


class Classifier(base_model.BaseTask):
    """Batch norm, dropout and a layer; the loss is weighted by rows."""

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("norm", bn_layers.BatchNormLayerNoPadding.Params().Set(dim=DIM, decay=0.9))
        self.CreateChild("dropout", layers.DropoutLayer.Params().Set(keep_prob=0.8))
        self.CreateChild(
            "dense",
            layers.FCLayer.Params().Set(input_dim=DIM, output_dim=1, activation="NONE"),
        )

    def ComputePredictions(self, theta, input_batch):
        # It is made for images.
        x = self.norm.FProp(theta.norm, input_batch.x[:, None, None])[:, 0, 0]
        return self.dense.FProp(theta.dense, self.dropout.FProp(theta.dropout, x))

    def ComputeLoss(self, theta, predictions, input_batch):
        y = input_batch.y
        losses = tf.nn.sigmoid_cross_entropy_with_logits(y, predictions)
        right = tf.cast(tf.equal(predictions > 0, y > 0.5), tf.float32)
        rows = tf.constant(float(BATCH))
        metrics = {"loss": tf.reduce_mean(losses), "accuracy": tf.reduce_mean(right)}
        return {name: (value, rows) for name, value in metrics.items()}, py_utils.NestedMap()


class Head(base_layer.BaseLayer):
    """The summed loss and the number of rows."""

    def FProp(self, theta, x, y):
        loss = tf.reduce_sum(tf.square(tf.cast(x, y.dtype) - y))
        return loss, tf.cast(tf.shape(x)[0], tf.float32)

    @classmethod
    def FPropMeta(cls, p, x, y):
        return py_utils.NestedMap(flops=x.size, out_shapes=(tshape.Shape([]), tshape.Shape([])))


class Hidden(base_layer.BaseLayer):
    """A fully connected layer and dropout that hand on the labels."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("dims", (DIM, DIM), "In and out.")
        return p

    def __init__(self, params):
        super().__init__(params)
        dims = self.params.dims
        dense = layers.FCLayer.Params().Set(
            input_dim=dims[0], output_dim=dims[1], activation="TANH"
        )
        self.CreateChild("dense", dense)
        self.CreateChild("dropout", layers.DropoutLayer.Params().Set(keep_prob=0.9))

    def FProp(self, theta, x, y):
        return self.dropout.FProp(theta.dropout, self.dense.FProp(theta.dense, x)), y

    @classmethod
    def FPropMeta(cls, p, x, y):
        out = tshape.Shape([x[0], p.dims[1]])
        return py_utils.NestedMap(flops=x.size * p.dims[1], out_shapes=(out, y))


class Pipelined(base_model.BaseTask):
    """A pipelined stack."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("stack", None, "The stack.")
        return p

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("stack", self.params.stack)

    def ComputePredictions(self, theta, input_batch):
        return self.stack.FProp(theta.stack, input_batch.x, input_batch.y)

    def ComputeLoss(self, theta, predictions, input_batch):
        loss, rows = predictions
        return {"loss": (loss / rows, rows)}, py_utils.NestedMap()


def trained(p):
    p.train.learner = learner.Learner.Params().Set(
        name="loss",
        learning_rate=0.1,
        optimizer=optimizer.Adam.Params(),
        lr_schedule=schedule.Constant.Params(),
    )
    return p


def stack_of(stages, dims=((DIM, 6), (6, 1))):
    """Layers of these dims, and the loss."""
    hidden = [Hidden.Params().Set(dims=pair) for pair in dims]
    shapes = tshape.Shape([BATCH, DIM]), tshape.Shape([BATCH, 1])
    return PartitionSequentialLayers([*hidden, Head.Params()], stages, *shapes)


class PlainPoints(base_model_params.SingleTaskModelParams):
    """Without a pipeline."""

    BAD = None
    STATEFUL = False

    def Train(self):
        p = Points.Params()
        p.source.Set(seed=1, bad=self.BAD, stateful=self.STATEFUL)
        return p

    def Test(self):
        p = Points.Params()
        p.source.Set(seed=2, number=5)
        return p

    def Task(self):
        return trained(Classifier.Params().Set(name="points"))


class DrawnPoints(PlainPoints):
    """A model whose input has no dataset."""

    def Train(self):
        return Drawn.Params().Set(name="drawn")


class SpoiledPoints(PlainPoints):
    """The fourth batch is not finite."""

    BAD = 3


class ShortStagedPoints(PlainPoints):
    """Declares two stages of three layers, as models for lingvo's own pipeline do."""

    DIMS = ((DIM, 6), (6, 1))

    def Task(self):
        stack = PipeliningLayer.Params().Set(
            cell_tpl=stack_of(2, self.DIMS), num_micro_batches=2, loss_inside=True
        )
        return trained(Pipelined.Params().Set(name="points", stack=stack))


class StagedPoints(ShortStagedPoints):
    """Has five layers; an old run of it is among the tests."""

    DIMS = ((DIM, 6), (6, 6), (6, 6), (6, 1))


class LimitedPoints(PlainPoints):
    """Says itself how long it is trained."""

    def Task(self):
        p = super().Task()
        p.train.max_steps = 3
        return p


class TunedPoints(ShortStagedPoints):
    """Says itself how it learns."""

    OPTIMIZER, WEIGHT_DECAY, LEARNING_RATE_SCHEDULE, WARMUP_STEPS = "adamw", 0.3, "linear", 2

    def Task(self):
        p = super().Task()
        Learning.of(self).change(p.train.learner)
        return p


class SeveralTasks(base_model_params.MultiTaskModelParams):
    """Is not trained."""


class UnevenPoints(ShortStagedPoints):
    """The last batch to judge by does not divide into microbatches."""

    def Test(self):
        p = super().Test()
        p.source.rest = 3
        return p


class PlannedPoints(PlainPoints):
    """Cuts its layers as the plan says."""

    PLAN = Plan("layers:2", num_microbatches=2)
    DIMS = ((DIM, 6), (6, 1))

    def Task(self):
        cells = stack_of(self.PLAN.num_stages, self.DIMS)
        stack = PipeliningLayer.ForPlan(self.PLAN, cell_tpl=cells, loss_inside=True)
        return trained(Pipelined.Params().Set(name="points", stack=stack))


class PairsOfPoints(PlannedPoints):
    """Two rows a batch, so that few numbers of rows are measured."""

    def Train(self):
        return super().Train().Set(batch_size=2, source=Pairs.Params().Set(seed=1))


class DeepPoints(PairsOfPoints):
    """Has four alike layers."""

    DIMS = ((DIM, 6), *[(6, 6)] * 4, (6, 1))


class SplitPoints(PlannedPoints):
    """As its plan has it, on two devices a stage."""

    PLAN = Plan("layers:2;data:2", num_microbatches=2, layout="batch:data")


class SmallDigits(DigitsPipelined):
    """Two layers of few channels."""

    CHANNELS = (4,)


class ByStep(schedule.BaseSchedule):
    """Learning rates by the step."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("values", [1.0], "Of the steps from 0 on.")
        return p

    def Value(self, step=None):
        return tf.gather(tf.constant(self.params.values), self.GetStep(step))


class Remembering(schedule.BaseSchedule):
    """A schedule with a variable."""

    def _CreateLayerVariables(self):
        super()._CreateLayerVariables()
        one = py_utils.WeightParams([], py_utils.WeightInit.Constant(1.0), tf.float32)
        self.CreateVariable("factor", one, trainable=False)

    def Value(self, step=None):
        return self.theta.factor
