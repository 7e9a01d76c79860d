"""What the wheel alone is for: rooms without TensorFlow, and what the others say."""

import importlib
import pkgutil
import subprocess
import sys

import pipemesh
from pipemesh.commands.main import HELP
from pipemesh.partition import partition
from pipemesh.plan import Plan
from pipemesh.schedule import gpipe, simulate

MISSING = (
    "this part of pipemesh needs tensorflow, which is not installed; in a checkout of pipemesh "
    "run: pip install '.[tensorflow]'"
)

plan = Plan("layers:2;data:2", "batch:data", schedule="zb_h1", num_microbatches=4)
assert Plan.from_text(str(plan)) == plan
assert partition([3, 1, 2, 2], 2).boundaries == (0, 2, 4)
assert simulate(gpipe(2, 3)).makespan == 12

alone, others = [], []
for room in pkgutil.iter_modules(pipemesh.__path__):
    try:
        importlib.import_module(f"pipemesh.{room.name}")
        alone.append(room.name)
    except ImportError as error:
        assert str(error) == MISSING, f"pipemesh.{room.name}: {error}"
        others.append(room.name)
assert {"mesh", "partition", "plan", "schedule"} <= set(alone), alone
assert {"layers", "lowering", "recurrent"} <= set(others), others
# Every command works, shows its help, or says in one line what is missing.
for words in (
    *([name, "--help"] for name in HELP),
    ["checkpoint", "inspect", "nowhere"],
    ["plan", "--model=models.digits.params.DigitsPipelined", "--devices=2"],
    ["worker"],
    [],
):
    done = subprocess.run(
        [sys.executable, "-m", "pipemesh", *words], capture_output=True, text=True, check=False
    )
    told = (words, done.returncode, done.stdout, done.stderr)
    if done.returncode == 0:
        assert words[-1] == "--help" and "usage: pipemesh" in done.stdout, told
    else:
        assert done.returncode == 2, told
        assert not words or done.stderr == f"error: {MISSING}\n", told

print(f"without TensorFlow: {', '.join(alone)}; what to install say {', '.join(others)}")
