"""Prints the table of all operations in the README."""

from pipemesh.lowering.op_list import op_table

print(op_table())
