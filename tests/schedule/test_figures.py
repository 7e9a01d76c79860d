"""The tables of small cases against the figures of the papers, cell by cell."""

from pathlib import Path

import pytest

from pipemesh.schedule import Costs, simulate
from pipemesh.schedule.builders import BUILDERS, build

FIGURES = Path(__file__).parent / "figures"
CASES = {
    "gpipe": (4, 4, Costs(1, 1)),
    "one_f_one_b": (4, 8, Costs(1, 2)),
    "interleaved_one_f_one_b": (4, 8, Costs(1, 2)),
    "looped_bfs": (4, 4, Costs(1, 1)),
    "zb_h1": (4, 8, Costs()),
    "zb_h2": (4, 8, Costs()),
    "zb_v": (4, 8, Costs()),
    "v_half": (4, 8, Costs()),
    "v_min": (4, 8, Costs()),
    "dual_pipe_v": (4, 10, Costs()),
    "forward_only": (4, 4, Costs()),
    "decode": (4, 4, Costs()),
}


def figure(name):
    lines = (FIGURES / f"{name}.txt").read_text().splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def drawn(name):
    """The timeline in the notation of the figures, one cell a tick."""
    num_devices, num_microbatches, costs = CASES[name]
    schedule = build(name, num_devices, num_microbatches)
    timeline = simulate(schedule, costs)
    rows = [["."] * int(timeline.makespan) for _ in schedule.rows]
    for span in timeline.spans():
        kind = span.action.kind if span.action.stage < num_devices else span.action.kind.lower()
        start, end = int(span.start), int(span.end)
        assert (start, end) == (span.start, span.end)
        rows[span.device][start:end] = [f"{kind}{span.action.microbatch + 1}"] + ["-"] * (
            end - start - 1
        )
    return rows


def test_every_builder_has_a_figure():
    assert set(CASES) == set(BUILDERS) == {path.stem for path in FIGURES.glob("*.txt")}


@pytest.mark.parametrize("name", [name for name in CASES if name != "dual_pipe_v"])
def test_table_is_the_figure(name):
    assert drawn(name) == figure(name)


def test_dual_pipe_v_does_the_figures_actions_in_order():
    rows = [[cell for cell in row if cell not in ".-"] for row in drawn("dual_pipe_v")]
    assert rows == figure("dual_pipe_v")
