"""Runs a test file of lingvo with pipemesh in the place of `lingvo.core.gpipe` and `.recurrent`.

lingvo's wheel has no tests; they come from a checkout of its sources at the installed version:

    git clone https://github.com/tensorflow/lingvo
    python -m tests.layers.lingvo_suite lingvo core/gpipe_test.py

Further arguments are those of unittest, such as `-k NAME`. What fails with `--own-modules` too,
which replaces nothing, says nothing. `--eager` runs the tests in the eager mode of lingvo.
`pipemesh/layers/README.md` has the results.
"""

from __future__ import annotations

import argparse
import gc
import importlib.machinery
import importlib.util
import pathlib
import sys
import unittest
from typing import Any

from absl import flags

from pipemesh.layers.lingvo_gpipe import replace_gpipe, replace_module


class Checkout:
    """Finds modules of lingvo that the wheel lacks, which tests import."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith("lingvo."):
            return None
        folder = self._path.joinpath(*name.split(".")[:-1])
        return importlib.machinery.PathFinder.find_spec(name, [str(folder)], target)


class Result(unittest.TextTestResult):
    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        # A test's graph and session are gigabytes at times.
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("file", help="below lingvo, such as core/gpipe_test.py")
    parser.add_argument("--own-modules", action="store_true")
    parser.add_argument("--eager", action="store_true")
    arguments, rest = parser.parse_known_args()
    if not arguments.own_modules:
        replace_gpipe()
        replace_module("lingvo.core.recurrent", "pipemesh.recurrent")
    sys.meta_path.append(Checkout(arguments.checkout.resolve()))
    name = "lingvo." + arguments.file.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(name)
    flags.FLAGS([name, *(["--enable_eager_execution"] if arguments.eager else [])])
    if arguments.eager:
        importlib.import_module("lingvo.core.py_utils").SetEagerMode(True)
    runner = unittest.TextTestRunner(resultclass=Result, verbosity=2)
    unittest.main(module, argv=[name, *rest], testRunner=runner)


if __name__ == "__main__":
    main()
