"""lingvo's own pipelined models run on pipemesh."""

import subprocess

import pytest

from tests.warm import warm

# In a process of its own: modules stay replaced.
PROGRAM = """
from pipemesh.backend.devices import start_cpu_devices

start_cpu_devices(2)

import numpy as np
import pytest
from absl import flags
from lingvo.core import gpipe

from pipemesh.errors import PipelineError, PlanError
from pipemesh.layers import PipeliningLayer, replace_gpipe
from pipemesh.training import registered

flags.FLAGS.mark_as_parsed()
theirs = gpipe.PipeliningLayer
with pytest.raises(PlanError, match=r"m has the PipeliningLayer of lingvo.*replace_gpipe\\(\\)"):
    registered._plan_of(theirs.Params(), "m", {"mesh": "layers:2"}, False)
with pytest.raises(PlanError, match=r"m has the PipeliningLayer of lingvo.*replace_gpipe\\(\\)"):
    registered._plan_of(theirs.Params(), "m", {"schedule": "1f1b"}, False)

sub = type("Early", (theirs,), {"__module__": "early"})
with pytest.raises(PipelineError, match=r"early is imported already, .* before you import it"):
    replace_gpipe()
del sub
import gc
gc.collect()
replace_gpipe()
replace_gpipe()
assert gpipe.PipeliningLayer is PipeliningLayer

from lingvo.core import base_layer, batch_major_attention, py_utils
from lingvo.tasks.lm import layers
from tests.layers.harness import run_tf1

assert batch_major_attention.gpipe.PipeliningLayer is PipeliningLayer


class Loss(base_layer.BaseLayer):
    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("lm", None, "")
        return p

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("lm", self.params.lm)

    def FProp(self, theta, ids, paddings):
        labels = py_utils.NestedMap(class_ids=ids, class_weights=1 - paddings)
        found, _ = self.lm.FProp(theta.lm, ids, paddings, labels=labels)
        return found.total_xent, found.logits


def model(pipelined):
    lm = layers.GPipeTransformerLm.CommonParams(
        vocab_size=32, model_dim=8, hidden_dim=16, num_heads=2, num_layers=2, num_shards=1,
        splits=2, num_micro_batches=2, residual_dropout_prob=0.1)
    lm.stack.pipelined = pipelined
    return Loss.Params().Set(name="loss", lm=lm)


ids = np.random.default_rng(0).integers(0, 32, [4, 5]).astype(np.int32)
paddings = np.array([[0, 0, 0, 0, n % 2] for n in range(4)], np.float32)
wanted, found = [
    run_tf1(model(pipelined), [ids, paddings], num_devices=2, loss=lambda y: y[0])
    for pipelined in (False, True)
]
assert len(found.grads) > 20
found.assert_close(wanted, atol=1e-5)
print("equal")
"""


@pytest.mark.slow
def test_lingvos_own_models_run_on_pipemesh():
    done = subprocess.run(
        warm("-c", PROGRAM), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]
