"""Jobs and splits as values."""

import pytest

from pipemesh.errors import PlanError
from pipemesh.partition import LayerCost
from pipemesh.plan import Plan
from pipemesh.plan.layer_figures import figures_of_costs
from pipemesh.plan.network import Link, Network
from pipemesh.scale import Job, Split

LAYERS = tuple(figures_of_costs([LayerCost(1.0, parameter_bytes=3)] * 2, 1))
NETWORK = Network(8, Link(0.0, 1.0), Link(0.0, 1.0))


def test_a_split_names_its_mesh_as_plans_do():
    split = Split(layers=4, data=2, model=8)
    assert split.num_devices == 64
    assert Plan(split.mesh, "batch:data;d_ff:model").mesh.num_devices == 64
    assert Split(1).mesh == "layers:1"


def test_weights_count_once():
    assert Job(LAYERS, NETWORK, 8).parameter_bytes == 6


@pytest.mark.parametrize(("layers", "batch"), [((), 8), (LAYERS, 0)])
def test_there_has_to_be_something_to_train(layers, batch):
    with pytest.raises(PlanError, match="must be one of each"):
        Job(layers, NETWORK, batch)
