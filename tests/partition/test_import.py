"""The partitioner alone: fast to import, and neither TensorFlow nor lingvo comes with it."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import sys, time
begin = time.process_time()
import numpy
loaded = time.process_time()
import pipemesh.partition
plan = pipemesh.partition.partition([3.5, 1, 1, 3] * 25, 8)
seconds = time.process_time() - loaded
import json
heavy = [name for name in ("tensorflow", "lingvo", "keras", "torch") if name in sys.modules]
print(json.dumps([seconds, loaded - begin, heavy, plan.num_stages]))
"""


@pytest.mark.serial
def test_import_and_one_call_take_little_longer_than_to_import_numpy():
    """Which takes 0.1 to 0.2 seconds of a core."""
    found = []
    for _ in range(5):
        # The least of a few: another process on the machine is not what is tested.
        run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
        seconds, of_numpy, heavy, stages = json.loads(run.stdout)
        assert heavy == []
        assert stages == 8
        found.append((seconds, of_numpy))
    own, theirs = map(min, zip(*found, strict=True))
    assert own < 1.5 * theirs


def test_the_command_line_loads_no_tensorflow():
    script = (
        "import sys; from pipemesh.commands.main import main; "
        "code = main(['partition', '-', '--stages', '2']); "
        "assert 'tensorflow' not in sys.modules and 'lingvo' not in sys.modules; sys.exit(code)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], input=b"1\n2\n3\n", capture_output=True, check=True
    )
    assert b"bottleneck 3" in run.stdout
