"""One case for each way of the layers with named dims, and the layouts that each allows."""

import dataclasses
import functools
import inspect
import itertools

import numpy as np
import tensorflow as tf
from lingvo.core import tshape

from pipemesh.errors import LayoutError
from pipemesh.layers import named
from pipemesh.layers.named.feed_forward import ACTIVATIONS
from pipemesh.layers.named.lora import LowRank, adapt
from pipemesh.lowering import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh
from tests.layers.named.harness import value_of
from tests.pairwise import covering

MESH = Mesh.from_text("a:2;b:2")
# A vocabulary of 7 is padded to 8, by `vocab_multiple` also where nothing is split.
BATCH, LENGTH, EMBED, VOCAB = 4, 6, 8, 7
TOKENS = ("batch", "length", "embed")
# The dims of images and volumes, by their number.
SPACE = {4: ("batch", "height", "width", "channels")}
SPACE[5] = ("batch", "depth", *SPACE[4][1:])
X = value_of("x", [BATCH, LENGTH, EMBED])
IMAGE = value_of("image", [BATCH, 8, 6, 4])
VOLUME = value_of("volume", [BATCH, 4, 4, 2, 4])
IDS = np.random.default_rng(1).integers(0, VOCAB, [BATCH, LENGTH]).astype(np.int32)
LABELS = np.random.default_rng(2).integers(0, VOCAB, [BATCH, LENGTH]).astype(np.int32)
WEIGHTS = np.random.default_rng(3).uniform(size=[BATCH, LENGTH]).astype(np.float32)
SEGMENTS = np.array([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 5, 5]] * 2, np.int32)
POSITIONS = np.array([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1]] * 2, np.int32)
PADDINGS = np.array([[0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1]] * 2, np.float32)
CROSS = {"causal": False, "cross": True}
MEMORY = value_of("memory", [BATCH, 8, EMBED])
MEMORY_SEGMENTS = np.array([[0, 0, 1, 1, 1, 1, 2, 2], [3] * 4 + [5] * 4] * 2, np.int32)
MEMORY_PADDINGS = np.array([[0] * 7 + [1], [0] * 5 + [1] * 3] * 2, np.float32)


class Dropout(named.Dropout):
    """Takes a plain tensor."""

    def FProp(self, theta, x):
        return super().FProp(theta, self.Named(x, "batch;length;embed"))


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer with its inputs."""

    name: str  # <class>-<variant>
    params: object
    inputs: tuple  # arrays, or None
    dims: tuple[str, ...]  # that rules may split, beside those of the first input
    tokens: tuple[str, ...] = TOKENS  # the dims of the first input and of the output

    def shapes(self):
        """The inputs' shapes as `FPropMeta` takes them."""
        return [None if x is None else tshape.Shape(list(x.shape)) for x in self.inputs]

    def specs(self):
        return [None if x is None else tf.TensorSpec(x.shape, x.dtype) for x in self.inputs]

    def meta(self, lowering):
        with named.lowering_scope(lowering):
            return self.params.cls.FPropMeta(self.params, *self.shapes())

    @functools.cached_property
    def layouts(self):
        """All that are legal, without those that differ by exchanging the axes."""
        return [rules for rules in self.all_layouts() if self.is_legal(rules)]

    def all_layouts(self):
        dims = (*self.tokens, *self.dims)
        for axes in itertools.product((None, *MESH.axis_names), repeat=len(dims)):
            used, of_tokens = (
                list(filter(None, some)) for some in (axes, axes[: len(self.tokens)])
            )
            if not used or used[0] != MESH.axis_names[0] or len(set(of_tokens)) < len(of_tokens):
                continue
            yield LayoutRules(tuple((d, axis) for d, axis in zip(dims, axes, strict=True) if axis))

    @functools.cached_property
    def most_split(self):
        """The layout that splits most dims."""
        return next(self.by_size(largest_first=True))

    def by_size(self, largest_first=False):
        """The legal layouts by the number of their rules; each is looked for when it is needed."""
        found = sorted(self.all_layouts(), key=lambda r: len(r.rules), reverse=largest_first)
        return filter(self.is_legal, found)

    def is_legal(self, rules):
        try:
            self.meta(placement(rules))
        except LayoutError:
            return False
        return True


def placement(rules, mesh=MESH):
    return PlacementLowering(mesh, rules, [f"CPU:{i}" for i in range(mesh.num_devices)])


def alone():
    return placement(LayoutRules(), Mesh.from_text("a:1"))


def _cases():
    for activation in ACTIVATIONS:
        params = named.FeedForward.Params().Set(input_dim=EMBED, hidden_dim=12)
        yield activation, params.Set(activation=activation), [X], ["d_ff"]
        if not activation.startswith("GELU"):
            dropping = params.Copy().Set(dropout_rate=0.3, use_bias=False)
            yield f"{activation}-dropout", dropping, [X], ["d_ff"]

    attention = named.Attention.Params().Set(input_dim=EMBED, num_heads=4)
    variants = {
        "plain": ({"block_size": 4}, [X]),
        "one_block": ({"use_bias": False, "split_length_by": "ring"}, [X]),
        "packed": ({"num_kv_heads": 2, "block_size": 4}, [X, SEGMENTS]),
        "rotary": ({"num_kv_heads": 2, "use_rotary": True, "use_bias": False}, [X]),
        "positions": ({"use_rotary": True}, [X, SEGMENTS, POSITIONS]),
        "relative": ({"relative_buckets": 6, "relative_max_distance": 9, "block_size": 4}, [X]),
        "paddings": ({"num_kv_heads": 1, "dim_per_head": 3}, [X, SEGMENTS, None, PADDINGS]),
        "limited": (
            {
                "num_kv_heads": 2,
                "dim_per_head": 6,
                "block_size": 2,
                "window": 3,
                "score_cap": 1.5,
                "score_scale": 0.7,
                "use_out_bias": False,
                "use_rotary": True,
                "split_length_by": "ring",
                "rotary_dim": 4,
                "norm_tpl": named.Norm.Params().Set(kind="rms"),
            },
            [X, SEGMENTS, POSITIONS],
        ),
    }
    both = {"causal": False, "block_size": 4, "relative_buckets": 8, "relative_max_distance": 9}
    variants |= {
        "both_sides": ({"use_rotary": True, "window": 3, **both}, [X, SEGMENTS, POSITIONS]),
        "cross": ({**CROSS, "block_size": 4}, [X, None, None, None, MEMORY]),
        "cross_packed": (
            {"num_kv_heads": 2, "norm_tpl": named.Norm.Params().Set(kind="rms"), **CROSS},
            [X, SEGMENTS, None, PADDINGS, MEMORY, MEMORY_SEGMENTS, MEMORY_PADDINGS],
        ),
    }
    for name, (changes, inputs) in variants.items():
        dims = ["heads", "kv_heads"] if changes.get("num_kv_heads") else ["heads"]
        dims += ["memory_length"] if changes.get("cross") else []
        yield name, attention.Copy().Set(**changes), inputs, dims

    for kind in ("layer", "rms"):
        yield kind, named.Norm.Params().Set(input_dim=EMBED, kind=kind), [X], []
    grouped = named.Norm.Params().Set(input_dim=4, dim="channels", kind="group", num_groups=2)
    yield "group", grouped, [IMAGE], []
    yield "images", named.BatchNorm.Params().Set(input_dim=4), [IMAGE], []
    yield "rate", Dropout.Params().Set(rate=0.4), [X], []
    yield "rate_0", Dropout.Params(), [X], []

    embedding = named.Embedding.Params().Set(
        vocab_size=VOCAB, vocab_multiple=2, embedding_dim=EMBED, max_length=8
    )
    for positions in ("none", "sinusoidal", "learned"):
        params = embedding.Copy().Set(positions=positions, scale_sqrt_depth=True)
        dims = ["vocab", "positions"] if positions == "learned" else ["vocab"]
        yield positions, params, [IDS], dims
    packed = embedding.Copy().Set(positions="learned", dropout_rate=0.3, unused_positions=2)
    yield "packed", packed, [IDS, POSITIONS], ["vocab", "positions"]
    typed = embedding.Copy().Set(num_types=2, sum_norm_tpl=named.Norm.Params())
    yield "types", typed, [IDS, None, IDS % 2], ["vocab", "types"]

    softmax = named.SoftmaxCrossEntropy.Params().Set(
        input_dim=EMBED, vocab_size=VOCAB, vocab_multiple=2
    )
    yield "plain", softmax, [X, LABELS], ["vocab"]
    yield "weights", softmax.Copy().Set(use_bias=False), [X, LABELS, WEIGHTS], ["vocab"]
    smooth = softmax.Copy().Set(label_smoothing=0.2)
    yield "smoothing", smooth, [X, LABELS, WEIGHTS], ["vocab"]
    yield "z_loss", softmax.Copy().Set(z_loss=0.1), [X, LABELS, WEIGHTS], ["vocab"]
    scaled = softmax.Copy().Set(logit_scale=0.5)
    yield "scaled", scaled, [X, LABELS, WEIGHTS], ["vocab"]
    yield "capped", softmax.Copy().Set(logit_cap=1.5), [X, LABELS, WEIGHTS], ["vocab"]

    experts = named.Experts.Params().Set(input_dim=EMBED, hidden_dim=4, num_experts=4)
    dims = ["experts", "expert_ff"]
    yield "top_2", experts, [X], dims
    yield "room_for_all", experts.Copy().Set(capacity_factor=None), [X], dims
    little = experts.Copy().Set(num_choices=1, capacity_factor=1.0, activation="SWIGLU")
    yield "top_1", little, [X, PADDINGS], dims

    block = named.TransformerBlock.Params().Set(input_dim=EMBED, num_heads=4, hidden_dim=12)
    yield "plain", block, [X], ["heads", "d_ff"]
    mixture = block.Copy().Set(hidden_dim=4)
    mixture.feed_forward_tpl = named.Experts.Params().Set(num_experts=4, activation="SWIGLU")
    dims = ["heads", "experts", "expert_ff"]
    yield "experts", mixture, [X, SEGMENTS, None, PADDINGS], dims
    normed = block.Copy().Set(parallel=True, output_norms=True)
    yield "parallel", normed, [X], ["heads", "d_ff"]
    yield "post_norm", block.Copy().Set(post_norm=True), [X], ["heads", "d_ff"]
    llama = block.Copy().Set(dropout_rate=0.3)
    llama.norm_tpl.kind = "rms"
    llama.attention_tpl.Set(num_kv_heads=2, use_rotary=True, use_bias=False)
    llama.feed_forward_tpl.Set(activation="SWIGLU", use_bias=False, dropout_rate=0.3)
    yield "llama", llama, [X, SEGMENTS, POSITIONS], ["heads", "kv_heads", "d_ff"]
    adapted = llama.Copy().Set(cross_attention_tpl=named.Attention.Params().Set(num_kv_heads=2))
    adapt([adapted], LowRank.Params().Set(rank=3, alpha=2.0, dropout_rate=0.3), "w_")
    inputs = [X, SEGMENTS, POSITIONS, None, MEMORY, MEMORY_SEGMENTS]
    yield "adapted", adapted, inputs, ["heads", "kv_heads", "d_ff"]

    convolution = named.Convolution.Params().Set(input_dim=4, output_dim=8)
    yield "valid", convolution.Copy().Set(padding="VALID", window=(3, 1)), [IMAGE], ["features"]
    strided = convolution.Copy().Set(strides=(2, 1), activation="NONE", window=(5, 2))
    yield "strides", strided, [IMAGE], ["features"]
    pixels = convolution.Copy().Set(window=(1, 1), use_bias=False, activation="GELU")
    yield "pixels", pixels, [IMAGE], ["features"]
    yield "volumes", convolution.Copy().Set(window=(2, 3, 1), strides=(1, 2, 1)), [VOLUME], []
    yield "residual", convolution.Copy().Set(output_dim=4, residual=True), [IMAGE], ["features"]


CASES = {}
for label, its_params, arrays, its_dims in _cases():
    title = f"{its_params.cls.__name__}-{label}"
    tokens = SPACE.get(arrays[0].ndim, TOKENS)
    its_params = its_params.Copy().Set(name="layer")
    case = Case(title, its_params, tuple(arrays), tuple(its_dims), tokens)
    assert CASES.setdefault(title, case) is case

# What the room exports that is a layer.
CLASSES = {
    name: thing
    for name, thing in vars(named).items()
    if name in named.__all__
    and inspect.isclass(thing)
    and issubclass(thing, named.NamedLayer)
    and thing is not named.NamedLayer
}


def of_classes():
    """For each class its cases."""
    found = {name: [] for name in CLASSES}
    for case in CASES.values():
        found[case.params.cls.__name__].append(case)
    return found


# By class the dims that all its cases treat alike: what differs between ways of feed-forward layers
# is done to single elements, between ways of attention to the rows behind the same products.
ALIKE = {
    "FeedForward": (*TOKENS, "d_ff"),
    "Attention": ("batch", "embed"),
    "SoftmaxCrossEntropy": ("batch", "embed"),
    **dict.fromkeys(("Convolution", "Embedding"), ("batch",)),
}


def sampled_layouts(kind):
    """For a class pairs of the name of a case and one of its layouts.

    Every two dims that are ever split together are so over one axis and over two, as far as they
    can, and every case has each of its dims split, but those in which its class is always alike: of
    these it is enough that some case has them split. A block consists of layers of other classes:
    the first one has each of its dims split, and others have the layout that splits most.
    """
    cases, is_block = of_classes()[kind], kind == "TransformerBlock"
    alike, shown = ALIKE.get(kind, ()), {}
    for case in cases:
        for rules in [case.most_split] if is_block and case is not cases[0] else case.layouts:
            split = {("" if dim in alike else case.name, dim) for dim, _ in rules.rules}
            pairs = itertools.combinations(() if is_block else rules.rules, 2)
            # The axes are alike: of one size.
            apart = {(a, b, x == y) for (a, x), (b, y) in pairs}
            shown[case.name, str(rules)] = {case.name, *split, *apart}
    # In the order of the cases.
    chosen = covering(shown)
    return [pair for pair in shown if pair in chosen]
