"""What a model is trained on, and in which order, knows nothing of the plan."""

import numpy as np
import pytest

from pipemesh.plan import Plan
from pipemesh.training.trainer import Trainer
from tests.models.one_billion_word.small_training import small_request

PLANS = (
    Plan("layers:2", num_microbatches=4),
    Plan("data:2;layers:2", "batch:data", "zb_h1", num_microbatches=2),
    Plan("layers:1;model:2", "heads:model;d_ff:model;vocab:model", num_microbatches=2),
)


@pytest.mark.slow
def test_every_plan_trains_on_the_same_batches(folder, tmp_path, train, monkeypatch):
    real = Trainer._next_batch
    batches = []

    def next_batch(self):
        batches.append(real(self))
        return batches[-1]

    monkeypatch.setattr(Trainer, "_next_batch", next_batch)

    def read(name, plan, **settings):
        batches.clear()
        request = small_request(tmp_path / name, folder, steps=3, plan=plan, **settings)
        assert train(request) == 0
        return [batch["ids"].numpy() for batch in batches]

    plain = read("plain", Plan(), PIPELINED=False)
    assert len(plain) == 3 and not np.array_equal(plain[0], plain[1])
    for number, plan in enumerate(PLANS):
        np.testing.assert_array_equal(read(str(number), plan), plain, err_msg=str(plan))
