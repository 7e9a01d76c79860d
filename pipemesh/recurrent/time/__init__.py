"""Cells along time: `Recurrent` and `StackedRecurrent`."""
