"""Draws the pictures of pipemesh/schedule/README.md: `python -m docs.pictures [FOLDER]`.

The pictures are in the repository; a test repeats this and compares.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pipemesh.report import memory_to_svg, to_svg
from pipemesh.report.schedule_drawing import LEFT
from pipemesh.report.svg import BAND, MUTED, SERIES, element, picture, rect, text
from pipemesh.schedule import (
    Costs,
    build,
    list_schedule,
    one_f_one_b,
    recompute,
    seq_one_f_one_b,
    simulate,
)

IMAGES = Path(__file__).parents[1] / "pipemesh" / "schedule" / "images"

_DRAWN = {
    "gpipe": "GPipe",
    "one_f_one_b": "1F1B",
    "interleaved_one_f_one_b": "Interleaved 1F1B",
    "looped_bfs": "Breadth-first on a loop",
    "zb_h1": "ZB-H1",
    "zb_h2": "ZB-H2",
    "zb_v": "ZB-V",
    "v_half": "V-Half",
    "v_min": "V-Min",
    "dual_pipe_v": "DualPipeV",
    "forward_only": "Forward only",
    "decode": "Decoding, four tokens",
}


def pictures() -> dict[str, str]:
    """Returns the SVG document of each picture by its file name."""
    drawn: dict[str, str] = {"pipeline.svg": _pipeline()}
    for name, title in _DRAWN.items():
        schedule = build(name, 4, 8)
        timeline = simulate(schedule, Costs().refined(schedule.num_stages // 4))
        drawn[f"{name}.svg"] = to_svg(timeline, title=f"{title}: 4 devices, 8 microbatches")
    for name in ("one_f_one_b", "zb_v", "v_min"):
        schedule = build(name, 4, 8)
        timeline = simulate(schedule, Costs().refined(schedule.num_stages // 4))
        drawn[f"{name}_memory.svg"] = memory_to_svg(
            timeline, title=f"{_DRAWN[name]}: (stage, microbatch) pairs held"
        )
    sliced = simulate(seq_one_f_one_b(4, 4, 2), Costs(forward=2, backward=4).refined(1, 2))
    drawn["seq_one_f_one_b.svg"] = to_svg(
        sliced, title="Seq1F1B: 4 devices, 4 microbatches, 2 slices"
    )
    slow_end = Costs(forward=[1, 1, 1, 2], backward=[2, 2, 2, 4])
    again = simulate(recompute(one_f_one_b(4, 8), costs=slow_end), slow_end)
    drawn["recompute.svg"] = to_svg(
        again, title="1F1B that recomputes: 4 devices, 8 microbatches, a slow last stage"
    )
    drawn["recompute_memory.svg"] = memory_to_svg(
        again, title="1F1B that recomputes: (stage, microbatch) pairs held"
    )
    uneven = Costs(
        forward=[1, 2, 1, 1, 2, 1, 1, 1],
        input_grad=[1, 2, 1, 1, 2, 1, 1, 1],
        weight_grad=0.5,
        transfer=0.25,
    )
    searched = simulate(list_schedule(uneven, 4, 8, memory_limit=8), uneven)
    drawn["list_schedule.svg"] = to_svg(
        searched, title="Searched: 4 devices, 8 microbatches, 8 unequal stages, slow transfers"
    )
    return drawn


def _pipeline() -> str:
    """Draws eight layers on a mesh of four devices, and the schedule of a step below them."""
    width, height, top, pitch, below = 1050, 340, 40, 198, 112
    parts: list[str] = []
    for stage in range(4):
        x = LEFT + stage * pitch
        parts.append(rect(x, top, 180, 62, class_="band", rx=6, fill=BAND))
        for layer in (0, 1):
            left = x + 10 + 84 * layer
            name = f"layer {2 * stage + layer}"
            parts += [
                rect(left, top + 8, 76, 26, rx=3, fill=SERIES[0][0]),
                text(left + 38, top + 25, name, anchor="middle", class_="on-layer", fill="#ffffff"),
            ]
        parts.append(text(x + 90, top + 52, f"stage {stage} on device {stage}", anchor="middle"))
        if stage:
            arrow = f"M {x - 16} {top + 21} h 12 m -5 -4 l 5 4 l -5 4"
            parts.append(
                element("path", class_="axis", d=arrow, fill="none", stroke=MUTED, stroke_width=1.5)
            )
    title = "One training step: 8 microbatches on the schedule 1F1B"
    step = to_svg(simulate(one_f_one_b(4, 8)), title=title)
    parts.append(step.replace("<svg ", f"<svg y='{below}' ", 1).rstrip())
    title = "8 layers, cut into 4 stages on the mesh layers:4"
    return picture(width, height, title, parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the pictures to a folder, by default the one in the repository."""
    words = list(sys.argv[1:] if argv is None else argv)
    folder = Path(words[0]) if words else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in pictures().items():
        (folder / name).write_text(svg, encoding="utf-8")
        print(f"wrote {folder / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
