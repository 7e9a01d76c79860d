"""Prints the table of all operations in the README."""

from pipemesh.lowering.registry import op_table

print(op_table())
