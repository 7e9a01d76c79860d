"""What a training was like: its record, and pages of one run or of several side by side.

A training appends lines to a record; pages are made of it without TensorFlow, at any time.

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
"""

from pipemesh.report.comparison import comparison
from pipemesh.report.difference import Part, parts_of
from pipemesh.report.page import page
from pipemesh.report.record import Record, to_line
from pipemesh.report.run import Run, read

__all__ = ["Part", "Record", "Run", "comparison", "page", "parts_of", "read", "to_line"]
