"""Prints the table of all operations that the README has."""

from pipemesh.lowering.op_list import op_table

print(op_table())
