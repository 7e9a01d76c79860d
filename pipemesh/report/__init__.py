"""The record of a run, pages of one run or of several, and pictures of schedules.

A run appends lines to a record. Pages are made from it at any time, without TensorFlow.

Example:
    >>> import tempfile
    >>> from pipemesh.report import Record, page, read
    >>> folder = tempfile.mkdtemp()
    >>> record = Record(folder)
    >>> _ = record.add("begin", step=0, name="Tiny")
    >>> for step in range(1, 4):
    ...     _ = record.add("step", step=step, loss=3.0 - step)
    >>> read(folder).train["loss"]
    [(1, 2.0), (2, 1.0), (3, 0.0)]
    >>> page(read(folder)).startswith("<!DOCTYPE html>")
    True

Timelines of schedules are drawn as text, SVG and HTML; writing them to a file is up to you:

    >>> from pipemesh.report import to_terminal
    >>> from pipemesh.schedule import Costs, one_f_one_b, simulate
    >>> print(to_terminal(simulate(one_f_one_b(2, 2), Costs(forward=1, backward=2))))
    device 0 |0F0 0F1         0B0----     0B1----
    device 1 |    1F0 1B0---- 1F1 1B1----
"""

from pipemesh.report.record import Record, Run, read
from pipemesh.report.run_pages import comparison, page
from pipemesh.report.schedule_drawing import memory_to_svg, to_html, to_svg
from pipemesh.report.schedule_text import to_terminal, to_trace

__all__ = [
    "Record",
    "Run",
    "comparison",
    "memory_to_svg",
    "page",
    "read",
    "to_html",
    "to_svg",
    "to_terminal",
    "to_trace",
]
