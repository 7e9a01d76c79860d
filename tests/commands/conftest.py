"""What the tests of commands share."""

import pytest

from pipemesh.commands.flags import FLAGS


@pytest.fixture(autouse=True)
def no_flags():
    """Flags that a test sets are no other test's."""
    yield
    FLAGS.declare([])
