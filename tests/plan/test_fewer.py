"""Plans for fewer devices than were asked for."""

import pytest

from pipemesh.errors import PlanError
from pipemesh.plan import Plan
from pipemesh.plan.fewer import fewer

SPLIT = "layout=batch:data;d_ff:model"


@pytest.mark.parametrize(
    ("plan", "devices", "wanted"),
    [
        ("mesh=layers:4 num_microbatches=8", 3, "layers:3"),
        ("mesh=layers:4 num_microbatches=8", 1, "layers:1"),
        # Replicas hold most of all, so they go first; what is split stays so.
        ("mesh=layers:2;data:2 layout=batch:data", 2, "layers:2;data:1"),
        ("mesh=layers:2;data:4 layout=batch:data", 7, "layers:2;data:2"),
        (f"mesh=layers:2;data:2;model:2 {SPLIT}", 4, "layers:2;data:1;model:2"),
        # A dim that divides by 6 divides by 3, 2 and 1.
        ("mesh=layers:1;model:6 layout=d_ff:model", 5, "layers:1;model:3"),
        ("mesh=layers:2;data:2 layout=batch:data", 4, "layers:2;data:2"),
        ("mesh=layers:2;data:2 layout=batch:data", 9, "layers:2;data:2"),
    ],
)
def test_the_mesh_with_the_most_devices_and_the_fewest_replicas_is_taken(plan, devices, wanted):
    before = Plan.from_text(plan)
    found = fewer(before, devices)
    assert str(found.mesh) == wanted
    assert set(before.changes(found)) <= {"mesh"}


def test_boundaries_go_with_the_number_of_stages():
    plan = Plan("layers:3", num_microbatches=4, boundaries=(0, 1, 2, 5))
    assert fewer(plan, 2).boundaries is None
    plan = Plan("layers:2;data:2", "batch:data", num_microbatches=4, boundaries=(0, 3, 5))
    assert fewer(plan, 3).boundaries == (0, 3, 5)


def test_what_the_model_cannot_have_is_passed_over():
    def check(plan):
        plan.check_batch(8)
        if plan.num_stages == 3:
            raise PlanError("blocks do not divide")

    assert str(fewer(Plan("layers:4", num_microbatches=4), 3, check).mesh) == "layers:2"


def test_what_the_schedule_cannot_have_is_passed_over():
    # On 3 devices interleaved stages need a multiple of 3 microbatches.
    plan = Plan("layers:4", schedule="interleaved:2", num_microbatches=8)
    assert str(fewer(plan, 3).mesh) == "layers:2"


def test_if_nothing_fits_it_is_said_why():
    def check(plan):
        raise PlanError("it has no such layer")

    with pytest.raises(PlanError, match=r"1 are left, and no smaller mesh .* no such layer"):
        fewer(Plan("layers:2"), 1, check)


def test_a_mesh_with_unequal_places_is_not_made_smaller():
    with pytest.raises(PlanError, match="not made smaller"):
        fewer(Plan("layers:2;model:2,1", "d_ff:model"), 2)


def test_a_table_is_for_its_number_of_places():
    plan = Plan("layers:2;data:2", "batch:data", num_microbatches=2)
    plan = Plan(plan.mesh, plan.layout, plan.table, num_microbatches=2)
    assert str(fewer(plan, 2).mesh) == "layers:2;data:1"
    with pytest.raises(PlanError, match="is for 2 places"):
        fewer(plan, 1)
