"""A training goes to lingvo's own pipeline and comes back."""

import shutil

import pytest

from pipemesh.layers import export_to_lingvo, import_from_lingvo
from tests.models.one_billion_word.small_training import (
    assert_same_weights,
    small_request,
    weights,
)


@pytest.mark.slow
def test_what_was_a_checkpoint_of_lingvo_goes_on_as_if_it_had_never_been_one(
    train, folder, tmp_path
):
    one, other = tmp_path / "one", tmp_path / "other"
    assert train(small_request(one, folder, LAYERS="lingvo")) == 0
    theirs = str(tmp_path / "theirs" / "train" / "ckpt-00000003")
    # The embedding and the block; the softmax.
    export_to_lingvo(str(one / "ckpt-3"), theirs, stages=(0, 2, 3))
    shutil.copytree(one / "vocabulary", other / "vocabulary")
    told = import_from_lingvo(theirs, str(other / "ckpt-3"), like=str(one / "ckpt-3"))
    assert told.endswith(f"tensors of {theirs}, data/batches of {one / 'ckpt-3'}")
    assert train(small_request(other, folder, LAYERS="lingvo")) == 0
    assert_same_weights(weights(one, 6), weights(other, 6))
