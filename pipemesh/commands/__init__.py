"""Every command line: flags, help, errors and exit codes, on one layer (`flags`).

A command is a module with `main(argv) -> exit code`. Importing this package loads nothing.
"""
