"""Draws the pictures of this room's README: `python -m pipemesh.schedule.pictures [FOLDER]`.

The pictures are in the repository; a test repeats this and compares.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pipemesh.schedule.builders import build, one_f_one_b, seq_one_f_one_b
from pipemesh.schedule.costs import Costs
from pipemesh.schedule.improve import recompute
from pipemesh.schedule.list_schedule import list_schedule
from pipemesh.schedule.render import memory_to_svg, to_svg
from pipemesh.schedule.simulate import simulate

IMAGES = Path(__file__).parent / "images"

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
    """All pictures of the README.

    Returns:
        For each file name the SVG document.

    Example:
        >>> sorted(pictures())[0]
        'decode.svg'
    """
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
    found = simulate(list_schedule(uneven, 4, 8, memory_limit=8), uneven)
    drawn["list_schedule.svg"] = to_svg(
        found, title="Searched: 4 devices, 8 microbatches, 8 unequal stages, slow transfers"
    )
    return drawn


def _pipeline() -> str:
    """Eight layers on a mesh of four devices, and the schedule of a step below them."""
    width, left, top, stage_width = 1050, 78, 40, 198
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='340' "
        f"viewBox='0 0 {width} 340' font-family=\"'DejaVu Sans', Verdana, Arial, sans-serif\" "
        "font-size='11'>",
        "<style>@media (prefers-color-scheme: dark) { .ink { fill: #ececec } "
        ".paper { fill: #181818 } .band { fill: #303030 } .line { stroke: #b0b0b0 } }</style>",
        f"<rect class='paper' width='{width}' height='340' fill='#ffffff'/>",
        "<text class='ink' fill='#1a1a1a' x='10' y='20' font-size='14' font-weight='bold'>"
        "8 layers, cut into 4 stages on the mesh layers:4</text>",
    ]
    for stage in range(4):
        x = left + stage * stage_width
        lines.append(
            f"<rect class='band' x='{x}' y='{top}' width='180' height='62' rx='6' fill='#f0f0f0'/>"
        )
        for layer in (0, 1):
            at = x + 10 + 84 * layer
            lines += [
                f"<rect x='{at}' y='{top + 8}' width='76' height='26' rx='3' fill='#0072b2'/>",
                f"<text x='{at + 38}' y='{top + 25}' fill='#ffffff' text-anchor='middle'>"
                f"layer {2 * stage + layer}</text>",
            ]
        lines.append(
            f"<text class='ink' fill='#1a1a1a' x='{x + 90}' y='{top + 52}' text-anchor='middle'>"
            f"stage {stage} on device {stage}</text>"
        )
        if stage:
            lines.append(
                f"<path class='line' d='M {x - 16} {top + 21} h 12 m -5 -4 l 5 4 l -5 4' "
                "fill='none' stroke='#595959' stroke-width='1.5'/>"
            )
    timeline = simulate(one_f_one_b(4, 8))
    drawn = to_svg(timeline, title="One training step: 8 microbatches on the schedule 1F1B")
    return "\n".join([*lines, drawn.replace("<svg ", "<svg y='112' ", 1).rstrip(), "</svg>", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the pictures to a folder, by default the one in the repository.

    Args:
        argv: at most one word, the folder.

    Returns:
        The exit code, 0.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    folder = Path(words[0]) if words else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"wrote {folder / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
