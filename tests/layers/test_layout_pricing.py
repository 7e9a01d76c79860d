"""Prices of layout rules for layers, with replicas and weights cut over them."""

import functools

import pytest
from lingvo.core import layers as lingvo_layers
from lingvo.core import tshape

from pipemesh.errors import LayoutError, PartitionError
from pipemesh.layers import layers_pricing
from pipemesh.layers.layout_pricing import counted, layers_shares
from pipemesh.layers.named import Embedding, SoftmaxCrossEntropy, TransformerBlock
from pipemesh.layers.partition_layers import named_layers
from pipemesh.mesh import LayoutRules, Mesh, find_layout
from pipemesh.plan import Figures, Link, Machine, Plan, predict
from pipemesh.plan.figures import Curve, LayerFigures
from pipemesh.plan.homes import cut_rules

MACHINE = Machine(flops=1e10, bandwidth=1e11, network=Link(0.0, 1e10))
ROWS, LENGTH, WIDTH, VOCAB = 16, 8, 16, 96
SHAPES = [tshape.Shape([ROWS, LENGTH])] * 4


def layers():
    block = TransformerBlock.Params().Set(input_dim=WIDTH, num_heads=4, hidden_dim=64)
    return [block.Copy(), block.Copy()]


@functools.cache
def pricing(mesh="data:2;model:2"):
    shape = tshape.Shape([ROWS, LENGTH, WIDTH])
    return layers_pricing(Mesh.from_text(mesh), layers(), MACHINE, shape)


def price(rules, mesh="data:2;model:2"):
    return pricing(mesh).price(LayoutRules.from_text(rules))


WEIGHTS = 4 * 2 * (4 * WIDTH * WIDTH + 2 * 64 * WIDTH + 64 + 13 * WIDTH)


def test_the_found_layout_is_the_best_of_those_written_by_hand():
    found = find_layout(pricing())
    assert found.is_best
    for rules in (
        "",
        "batch:data",
        "batch:data;heads:model;d_ff:model",
        "batch:data;heads:model;d_ff:model;length:model",
        "heads:data;d_ff:model",
        "batch:data;embed:data",
    ):
        assert found.price.seconds <= price(rules).seconds


@pytest.mark.parametrize("speed", [{"flops": 1e15, "bandwidth": 1e9}, {"flops": 1e9}])
def test_no_layout_of_layers_is_below_its_bound(speed):
    """A layer without named dims has the rows of its replica."""
    dense = lingvo_layers.FCLayer.Params().Set(input_dim=WIDTH, output_dim=WIDTH)
    shape, mesh = tshape.Shape([ROWS, LENGTH, WIDTH]), Mesh.from_text("data:2;model:2")
    machine = Machine(**speed, network=Link(0.0, 1e15))
    program = layers_pricing(mesh, [dense, *layers()], machine, shape)
    for text in ("", "batch:data", "d_ff:model", "batch:data;heads:model;d_ff:model", "embed:data"):
        rules = LayoutRules.from_text(text)
        least = program.least({dim: rules.axis(dim) for dim in program.sizes})
        assert least.seconds <= program.price(rules).seconds * (1 + 1e-9)


def test_memory_decides_for_split_weights():
    free = find_layout(pricing("data:4"))
    limit = 0.95 * free.price.memory
    tight = find_layout(pricing("data:4"), memory=limit)
    assert tight.price.memory <= limit
    assert tight.price.seconds >= free.price.seconds
    assert tight.is_best


def test_replicas_sum_gradients_once():
    """All weights are equal on both, so an all-reduce sends as many bytes as they have."""
    found = price("batch:data", "data:2")
    assert set(found.parts) == {"compute", "data"}
    assert 1e10 * found.parts["data"] == pytest.approx(WEIGHTS, rel=0.02)


def test_replicas_that_share_weights_fetch_them_once_a_step():
    """One stage holds all of them meanwhile, so the search leaves such rules out."""
    copies, cut = (
        price(rules, "data:2").parts["data"] for rules in ("batch:data", "batch:data;embed:data")
    )
    assert cut == pytest.approx(copies)
    assert not any(
        rules.axis(dim) == rules.axis("batch") is not None
        for rules, _ in find_layout(pricing()).table
        for dim in ("embed", "heads", "d_ff")
    )


def test_a_rule_over_the_batchs_axis_needs_a_weight():
    with pytest.raises(LayoutError, match="names dim 'length', which no tensor has"):
        price("batch:data;length:data")


def stack():
    return [Embedding.Params().Set(vocab_size=VOCAB, embedding_dim=WIDTH), *layers()]


@functools.cache
def shares():
    return layers_shares(stack(), MACHINE, ROWS, SHAPES[0])


def seconds(counts, direction):
    rows = counts.communication.work.items()
    return sum(MACHINE.operation(*row) for key, row in rows if key[2] == direction)


def test_shares_of_two_devices_hold_for_four():
    """All costs of a device, counted again, are those that two devices have foretold."""
    shape = SHAPES[0]
    plain = counted(named_layers(stack()), [shape], Mesh(()), LayoutRules())
    tried = 0
    for text, of_layers in shares().items():
        rules = LayoutRules.from_text(text)
        if cut_rules(LayoutRules.from_text(f"batch:data;{text}")).rules:
            continue
        four = counted(named_layers(stack()), [shape], Mesh.from_text("model:4"), rules)
        for share, one, part in zip(of_layers, plain, four, strict=True):
            tried += share.most > 1
            assert share.most == 1 or share.most % 4 == 0
            number = share.among(4)
            assert number * one.held_bytes * share.part(4, share.weights) == pytest.approx(
                number * part.held_bytes
            )
            wanted = {}
            for (_, primitive, direction), row in part.communication.rows.items():
                wanted[primitive, direction == "backward"] = row
            found = {
                (each.primitive, each.backward): (each.calls, each.calls * each.sent(4, ROWS))
                for each in share.sent
            }
            assert {key: pytest.approx(row) for key, row in wanted.items()} == found
            done = sum(seconds(one, way) for way in ("forward", "backward"))
            left = sum(seconds(part, way) for way in ("forward", "backward"))
            assert done * share.part(4, share.work) == pytest.approx(left, rel=0.01)
    assert tried > 2


def test_layers_without_named_dims_have_no_shares():
    dense = lingvo_layers.FCLayer.Params().Set(input_dim=8, output_dim=8)
    assert layers_shares([dense], MACHINE, 4, tshape.Shape([4, 8])) == {}


@pytest.mark.parametrize("mesh", ["model:2", "data:2", "data:2;model:2"])
def test_forecasts_of_shares_are_the_prices_of_rules(mesh):
    """Of a step on a machine whose layers take as long as they are priced."""
    program = layers_pricing(Mesh.from_text(mesh), stack(), MACHINE, SHAPES[0])
    plain = counted(named_layers(stack()), [SHAPES[0]], Mesh(()), LayoutRules())
    nothing = Curve(((ROWS, 0.0),))

    def curve(meta, direction):
        return Curve(((ROWS, seconds(meta, direction)),))

    found = Figures(
        tuple(
            LayerFigures(
                str(number),
                {"F": curve(meta, "forward"), "B": curve(meta, "backward")},
                meta.held_bytes,
                nothing,
                nothing,
                {rules: of_layers[number] for rules, of_layers in shares().items()},
            )
            for number, meta in enumerate(plain)
        ),
        transfer=MACHINE.network,
    )
    tried = []
    for text in ["", *shares()]:
        rules = LayoutRules.from_text(
            ";".join(["batch:data"] * ("data" in mesh) + [text] * bool(text))
        )
        if {axis for _, axis in rules.rules} == set(Mesh.from_text(mesh).axis_names):
            tried.append(text)
            plan = Plan(f"layers:1;{mesh}", rules, remat="none")
            price = program.price(rules).seconds
            assert predict(plan, found, ROWS).seconds == pytest.approx(price, rel=0.02)
    assert len(tried) >= (1 if mesh == "model:2" else 2)


def test_vocabularies_are_searched_too():
    named = [
        Embedding.Params().Set(vocab_size=VOCAB, embedding_dim=WIDTH),
        SoftmaxCrossEntropy.Params().Set(vocab_size=VOCAB, input_dim=WIDTH),
    ]
    program = layers_pricing(Mesh.from_text("model:4"), named[:1], MACHINE, SHAPES[0])
    assert set(program.sizes) == {"batch", "length", "vocab", "embed"}
    # Padded, so an axis of any size can split it.
    assert not program.sizes["vocab"]
    assert find_layout(program).is_best


def test_layers_without_named_dims_are_not_split():
    dense = lingvo_layers.FCLayer.Params().Set(input_dim=8, output_dim=8)
    program = layers_pricing(Mesh.from_text("model:2"), [dense], MACHINE, tshape.Shape([4, 8]))
    assert not program.sizes
    found = find_layout(program)
    assert not found.rules.rules
    assert found.price.seconds == pytest.approx(3 * 2 * 4 * 8 * 8 / 1e10, rel=0.1)


@pytest.mark.parametrize(
    ("mesh", "shape", "error", "message"),
    [
        ("layers:2", [4, 8, WIDTH], LayoutError, "has the axis 'layers'"),
        ("data:2", [4, 8], PartitionError, "give one of each"),
    ],
)
def test_what_cannot_be_priced_is_an_error(mesh, shape, error, message):
    with pytest.raises(error, match=message):
        layers_pricing(Mesh.from_text(mesh), layers(), MACHINE, tshape.Shape(shape))
