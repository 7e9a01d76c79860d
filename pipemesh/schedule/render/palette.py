"""Colours of the five kinds of action.

From the palette of Okabe and Ito, whose colours people with any common colour blindness can tell
apart. Stages further on in a device are paler. Every cell also carries its kind as a letter
wherever there is room, so no picture depends on colour alone.
"""

from __future__ import annotations

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recomputation",
}
_BASE = {
    "F": (0, 114, 178),
    "B": (213, 94, 0),
    "I": (230, 159, 0),
    "W": (0, 158, 115),
    "R": (86, 180, 233),
}
_PALEST = 0.6
INK, PAPER, MUTED, GRID = "#1a1a1a", "#ffffff", "#595959", "#d9d9d9"
BAND, EDGE = "#f0f0f0", "#8a3f6b"
# How text and lines of a picture are drawn.
INK_TEXT = f"class='ink' fill='{INK}'"
MUTED_TEXT = f"class='muted' fill='{MUTED}'"
AXIS_LINE = f"class='axis' stroke='{MUTED}'"
DARK_INK, DARK_PAPER, DARK_MUTED = "#ececec", "#181818", "#b0b0b0"
# The attributes of a picture are for light surroundings, and where styles are ignored.
DARK_STYLE = (
    f"@media (prefers-color-scheme: dark) {{ .ink {{ fill: {DARK_INK} }} "
    f".muted {{ fill: {DARK_MUTED} }} .paper {{ fill: {DARK_PAPER} }} .band {{ fill: #303030 }} "
    f".cell {{ stroke: {DARK_PAPER} }} .axis {{ stroke: {DARK_MUTED} }} "
    ".grid { stroke: #4d4d4d } .held { stroke: #e29bc4 } }"
)


def fill(kind: str, level: float = 0.0) -> tuple[int, int, int]:
    """The colour of a kind, mixed with white.

    Args:
        kind: one of `FBIWR`.
        level: 0 for the full colour up to 1 for the palest.

    Returns:
        Red, green and blue from 0 to 255.

    Example:
        >>> fill("F")
        (0, 114, 178)
    """
    share = level * _PALEST
    red, green, blue = (round(c + (255 - c) * share) for c in _BASE[kind])
    return red, green, blue


def ink(background: tuple[int, int, int]) -> str:
    """Black or white, whichever is easier to read on a background (WCAG relative luminance).

    Example:
        >>> ink((255, 255, 255)), ink((0, 0, 0))
        ('#000000', '#ffffff')
    """
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (part / 255 for part in background)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # Equal contrast (L + 0.05) / 0.05 = 1.05 / (L + 0.05) is at L = 0.179.
    return "#000000" if luminance > 0.179 else "#ffffff"


def hexadecimal(colour: tuple[int, int, int]) -> str:
    """Red, green and blue as a web colour.

    Example:
        >>> hexadecimal((0, 114, 178))
        '#0072b2'
    """
    return "#{:02x}{:02x}{:02x}".format(*colour)


def levels(stage_devices: tuple[int, ...]) -> tuple[float, ...]:
    """For each stage how pale it is: 0 for the first stage of a device, 1 for the last of many.

    Example:
        >>> levels((0, 1, 1, 0))
        (0.0, 0.0, 1.0, 1.0)
    """
    seen: dict[int, int] = {}
    order: list[int] = []
    for device in stage_devices:
        order.append(seen.get(device, 0))
        seen[device] = order[-1] + 1
    most = max(order, default=0)
    return tuple(index / most if most else 0.0 for index in order)
