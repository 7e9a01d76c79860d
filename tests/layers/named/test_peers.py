"""Models built of named layers have the logits and gradients of those of `transformers`."""

import types

import numpy as np
import pytest

from tests.layers.named.harness import run
from tests.layers.named.peers import VOCAB, gpt2, llama, mixtral

pytestmark = pytest.mark.slow

BATCH, LENGTH = 2, 9
IDS = np.random.default_rng(5).integers(0, VOCAB, [BATCH, LENGTH]).astype(np.int32)
# Labels that do not count have this number.
IGNORED = -100


def whole_rows():
    """Every row is one text: nothing else is said of it."""
    return types.SimpleNamespace(
        theirs={}, labels=IDS, segments=None, positions=None, paddings=None, real=np.ones_like(IDS)
    )


def padded_rows():
    """Rows begin with padding, which the tokens after it may not see."""
    paddings = np.zeros([BATCH, LENGTH], np.float32)
    paddings[0, :3] = paddings[1, :1] = 1
    real = 1 - paddings
    labels = np.where(paddings > 0, IGNORED, IDS)
    # The first token has none before it.
    labels[0, 3] = labels[1, 1] = IGNORED
    return types.SimpleNamespace(
        theirs={"attention_mask": real.astype(np.int64)},
        labels=labels,
        segments=None,
        positions=None,
        paddings=paddings,
        real=real,
    )


def packed_rows():
    """Rows have several texts, whose positions begin anew."""
    segments = np.array([[0, 0, 0, 0, 1, 1, 1, 2, 2], [4, 4, 5, 5, 5, 5, 5, 5, 6]], np.int32)
    first = np.diff(segments, axis=1, prepend=-1) != 0
    places = np.arange(LENGTH) - np.maximum.accumulate(np.arange(LENGTH) * first, axis=1)
    seen = np.tril(segments[:, :, None] == segments[:, None, :])
    return types.SimpleNamespace(
        theirs={
            "attention_mask": np.where(seen, 0.0, -1e9).astype(np.float32)[:, None],
            "position_ids": places,
        },
        labels=np.where(first, IGNORED, IDS),
        segments=segments,
        positions=places.astype(np.int32),
        paddings=None,
        real=np.ones_like(IDS),
    )


# Rotary positions count from each other, so that those of packed rows show with learned ones alone.
CASES = {
    "gpt2, packed": (gpt2, packed_rows),
    "llama, padded": (llama, padded_rows),
    "mixtral": (mixtral, whole_rows),
    "mixtral, padded": (mixtral, padded_rows),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """The model of `transformers`, its logits, its loss, and what we need to do the same."""
    reason = "the models to compare with are not installed: pip install -e '.[dev,peers]'"
    torch = pytest.importorskip("torch", reason=reason)
    package = pytest.importorskip("transformers", reason=reason)
    make_peer, make_rows = CASES[request.param]
    peer, rows = make_peer(), make_rows()
    torch.manual_seed(7)
    model = peer.make(package).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for weight in model.parameters():
            # Away from zeros and ones, and large enough for logits that differ.
            weight.add_(0.3 * torch.randn(weight.shape))
    tensors = {name: torch.tensor(value) for name, value in rows.theirs.items()}
    labels = torch.tensor(rows.labels, dtype=torch.int64)
    found = model(torch.tensor(IDS.astype(np.int64)), labels=labels, use_cache=False, **tensors)
    found.loss.backward()
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    grads = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    assert {name for name, _ in peer.names.values()} == set(weights)
    return types.SimpleNamespace(
        peer=peer,
        rows=rows,
        logits=found.logits.detach().numpy(),
        loss=found.loss.item(),
        values=ours(peer, weights, 1),
        grads=ours(peer, grads, 0),
        # Of keys' biases, which are a part of a weight in theirs, the gradient is 0.
        most={name: abs(grad).max() for name, grad in grads.items()},
    )


def ours(peer, theirs, one):
    """Their weights, or gradients, by the names and in the order of ours."""
    return {
        # Of a norm's scale we keep what differs from one.
        path: np.ascontiguousarray(change(theirs[name])) - one * path.endswith("norm.scale")
        for path, (name, change) in peer.names.items()
    }


@pytest.mark.parametrize("is_split", [False, True])
def test_logits_loss_and_gradients_are_theirs(case, is_split):
    peer, rows = case.peer, case.rows
    # Theirs predict the next token inside of the model; ours take what is to be predicted.
    labels = np.concatenate([rows.labels[:, 1:], np.full([BATCH, 1], IGNORED)], 1).astype(np.int32)
    counts = (labels != IGNORED).astype(np.float32)
    inputs = [IDS, np.maximum(labels, 0), counts, rows.segments, rows.positions, rows.paddings]
    mesh, rules = peer.layout if is_split else ("model:1", "")
    found = run(
        peer.params, inputs, mesh, rules, values=case.values, loss=lambda outputs: outputs[1]
    )
    logits, loss = found.outputs
    real = rows.real > 0
    assert np.std(case.logits[real]) > 0.5
    np.testing.assert_allclose(logits[real], case.logits[real], rtol=0, atol=1e-4)
    np.testing.assert_allclose(loss, case.loss, rtol=0, atol=1e-4)

    assert found.grads.keys() == case.grads.keys()
    if peer.names["softmax.w"][0] == peer.names["embedding.table"][0]:
        tied = found.grads["embedding.table"] + found.grads["softmax.w"].T
        found.grads |= {"embedding.table": tied, "softmax.w": tied.T}
    for path, wanted in case.grads.items():
        most = case.most[peer.names[path][0]]
        assert most > 1e-3, path
        np.testing.assert_allclose(
            found.grads[path], wanted, rtol=0, atol=1e-4 * most, err_msg=path
        )
