"""Checkpoints without tensors, for tests of folders and locks."""

import random

from pipemesh.checkpoint import Manifest

DATA = "data-00000-of-00001"


def make(tmp_path, step, score=None, note=None):
    path = tmp_path / f"ckpt-{step}"
    for end in ("index", DATA):
        path.with_name(f"{path.name}.{end}").write_bytes(b"%d" % step)
    Manifest.of(str(path), step=step, note=note or {}, score=score).write(str(path))
    return str(path)


def flipped(good, number):
    """So many copies of some bytes, each with another bit flipped."""
    rng = random.Random(0)
    for _ in range(number):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        yield bytes(bad)
