"""The named configurations, none of whose weights is allocated here."""

import pytest
from lingvo import model_registry
from lingvo.core import optimizer, schedule

from models.one_billion_word.choice import choose, default_figures
from models.one_billion_word.named_transformer import (
    ExpertsBlock,
    ExpertsEmbedding,
    NamedBlock,
    NamedEmbedding,
    NamedSoftmax,
)
from models.one_billion_word.params import (
    CONFIGURATIONS,
    OneBillionWordGPipe32,
    boundaries_of,
    layer_flops_of,
)
from models.one_billion_word.sizes import LAYERS
from models.one_billion_word.transformer import Block, Embedding, Softmax
from pipemesh.plan import Plan, predict


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_configuration_is_registered(name):
    key = f"models.one_billion_word.params.{name}"
    assert issubclass(model_registry.GetClass(key), CONFIGURATIONS[name])
    for dataset in ("Train", "Dev", "Test"):
        params = model_registry.GetParams(key, dataset)
        assert params.input.heldout == (dataset != "Train")
        assert params.task.name == "language_model"


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_stages_hold_every_layer_once_and_in_order(name, layers):
    config = CONFIGURATIONS[name]()
    config.LAYERS = layers
    stack = config.Task().stack
    assert len(stack.cell_tpl) == config.PLAN.num_stages
    assert config.BATCH_SIZE % stack.num_micro_batches == 0
    layers = [layer for cell in stack.cell_tpl for layer in cell.sub]
    first, block, last = {
        "lingvo": (Embedding, Block, Softmax),
        "named": (
            (ExpertsEmbedding, ExpertsBlock, NamedSoftmax)
            if config.NUM_EXPERTS
            else (NamedEmbedding, NamedBlock, NamedSoftmax)
        ),
    }[config.LAYERS]
    assert [layer.cls for layer in layers] == [first, *[block] * config.NUM_LAYERS, last]
    assert [layer.name for layer in layers] == [f"cell_{i:03d}" for i in range(len(layers))]


def test_gpipe32_is_what_its_name_promises():
    config = OneBillionWordGPipe32()
    task = config.Task()
    cells = task.stack.cell_tpl
    assert [sum(layer.cls is NamedBlock for layer in cell.sub) for cell in cells] == [8, 8, 8, 8]
    assert task.stack.num_micro_batches == 32
    assert (config.BATCH_SIZE, config.SEQUENCE_LENGTH) == (32, 1024)
    embedding, block, softmax = cells[0].sub[0], cells[2].sub[3], cells[3].sub[-1]
    assert (embedding.vocab_size, embedding.embedding_dim) == (32_000, 2048)
    assert (softmax.vocab_size, softmax.input_dim) == (32_000, 2048)
    assert (block.input_dim, block.hidden_dim, block.num_heads) == (2048, 8192, 16)
    assert embedding.dropout_rate == block.dropout_rate == 0.1
    learner = task.train.learner
    assert learner.optimizer.cls is optimizer.Adam
    assert learner.lr_schedule.cls is schedule.TransformerSchedule
    assert learner.lr_schedule.warmup_steps == 40_000
    assert learner.lr_schedule.model_dim == 2048
    params = config.Train()
    assert (params.vocab_size, params.sequence_length, params.batch_size) == (32_000, 1024, 32)


@pytest.mark.parametrize(
    ("mesh", "sizes"), [("layers:2;model:4,1", (6, 1)), ("layers:2;model:1,4", (2, 5))]
)
def test_a_home_with_more_devices_takes_more_of_the_layers(mesh, sizes):
    config = CONFIGURATIONS["OneBillionWordTiny"]()
    config.PLAN = Plan(mesh, "heads:model;d_ff:model;vocab:model", num_microbatches=8)
    cells = config.Task().stack.cell_tpl
    assert sum(len(cell.sub) for cell in cells) == 7
    assert [len(cell.sub) for cell in cells] == list(sizes)


def test_what_is_chosen_counts_on_the_devices_of_each_home():
    """Four times the flops on four times the devices take as long, so nobody waits for long."""
    config = CONFIGURATIONS["OneBillionWordTiny"]()
    config.CHOSEN, flops = (), [4e14 / 3] * 3 + [1e14 / 4] * 4
    bubbles = []
    for mesh in ("layers:2;model:4,1", "layers:2;model:4"):
        config.PLAN = Plan(mesh, "heads:model;d_ff:model", num_microbatches=8, remat="none")
        bubbles.append(choose(config, flops, (0, 3, 7), "GPU", None).bubble)
    assert bubbles[0] == pytest.approx(1 / 9, abs=1e-3) and bubbles[1] > 0.3


def test_the_choice_is_the_fastest_forecast_that_fits():
    config = CONFIGURATIONS["OneBillionWordBase"]()
    flops, cuts, available = layer_flops_of(config), boundaries_of(config), 10**9
    choice = choose(config, flops, cuts, "CPU", available)
    figures = default_figures(config, flops, "CPU")

    def forecast(number, remat):
        plan = Plan(config.PLAN.mesh, num_microbatches=number, remat=remat, boundaries=cuts)
        return predict(plan, figures, config.BATCH_SIZE)

    every = [forecast(2**n, remat) for n in range(7) for remat in ("none", "full")]
    fitting = [each for each in every if max(each.memory) <= available]
    best = min(fitting, key=lambda each: each.seconds)
    assert 0 < len(fitting) < len(every)
    assert dict(best.plan.changes(choice.plan)).keys() == {"boundaries"}
    assert (choice.memory, choice.bubble) == (int(max(best.memory)), best.bubble)


def test_one_program_may_split_the_softmax_along_the_stages():
    config = CONFIGURATIONS["OneBillionWordTiny"]()
    config.CHOSEN = ("num_microbatches",)
    config.PLAN = Plan("layers:2", "vocab:layers", "gpipe", 8, lowering="simd")
    cuts = boundaries_of(config)
    choice = choose(config, layer_flops_of(config), cuts, "CPU", None)
    assert choice.plan.lowering == "simd" and choice.plan.layout == config.PLAN.layout
    assert choice.plan.num_microbatches > 1 and choice.plan.boundaries is None
