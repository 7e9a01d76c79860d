"""The benchmark of plans builds its models, and draws plans that were not fitted."""

import subprocess

import pytest

from pipemesh.partition import LayerCost
from pipemesh.plan import Figures
from pipemesh.plan.figures import figures_of_costs
from tests.benchmarks.conftest import BENCHMARKS
from tests.warm import warm

BATCH, LAYERS = 32, 7
PROGRAM = f"""
import runpy, sys
sys.path.insert(0, {str(BENCHMARKS / "plan")!r})
runpy.run_path({str(BENCHMARKS / "plan" / "run.py")!r}, run_name="__main__")
"""


def made_figures():
    costs = [
        LayerCost(
            0.001,
            backward=0.002,
            parameter_bytes=1e6,
            activation_bytes=1e5,
            boundary_bytes=1e4,
            name=f"l{n}",
        )
        for n in range(LAYERS)
    ]
    return Figures(tuple(figures_of_costs(costs, BATCH)), cores=2.0, batch=BATCH)


@pytest.mark.slow
def test_a_model_is_built_and_timed_with_figures_that_are_there(tmp_path):
    """No plan is measured; the model under the plain plan is."""
    path = tmp_path / "figures.json"
    path.write_text(made_figures().to_json(), encoding="utf-8")
    flags = [
        "--family=dense",
        "--plans=0",
        f"--figures={path}",
        f"--out={tmp_path / 'steps.jsonl'}",
    ]
    command = warm("-c", PROGRAM, *flags)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "steps.jsonl").exists()


def test_plans_are_drawn_by_their_seed_without_those_that_are_fitted(modules_of):
    (run,) = modules_of("plan", "run")
    figures = made_figures()
    first, second = run.plans_of(figures, 1), run.plans_of(figures, 2)
    assert first != second and sorted(map(str, first)) == sorted(map(str, second))
    assert first == run.plans_of(figures, 1)
    assert run.PLAIN not in first
    assert all(plan.num_microbatches <= run.MOST_MICROBATCHES for plan in first)
