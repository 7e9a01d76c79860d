"""An instance of every policy of recomputation, for the layers of `tests/recurrent/stack.py`."""

from pipemesh.recurrent import REMAT_POLICIES, Selective

REMAT = {
    **{name: name for name in REMAT_POLICIES},
    # Policies without a name.
    "selective": Selective(
        lambda name: name in ("embedding", "layer1", "layer2", "layer6", "head")
    ),
}
