"""What the wheel alone is for: rooms without TensorFlow, and what the others say."""

import importlib
import pkgutil

import pipemesh
from pipemesh.partition import partition
from pipemesh.plan import Plan
from pipemesh.schedule import gpipe, simulate

MISSING = (
    "this part of pipemesh needs tensorflow, which is not installed: "
    "pip install 'pipemesh[tensorflow]'"
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
print(f"without TensorFlow: {', '.join(alone)}; what to install say {', '.join(others)}")
