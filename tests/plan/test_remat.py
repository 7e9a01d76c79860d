"""What policies compute again; `tests/recurrent/test_remat.py` has the executor's side."""

from pipemesh.plan.remat import modes_of
from pipemesh.schedule import gpipe


def test_each_stage_has_its_own_policy():
    table = gpipe(2, 2)
    assert set(modes_of("custom", table).values()) == set(modes_of("full", table).values())
    found = modes_of("except_last,none", table)
    assert found == {(0, 0): "full", (0, 1): "none", (1, 0): "none", (1, 1): "none"}
