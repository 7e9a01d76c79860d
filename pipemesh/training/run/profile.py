"""A profile of some steps, by TensorFlow's profiler; its failures never end a run."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterator

import tensorflow as tf

from pipemesh.checkpoint.reader import reason

# The folder in which TensorBoard looks for profiles.
_FOLDER = os.path.join("plugins", "profile")


class Profile:
    """A profile of the steps from `steps[0]` to `steps[1]`; `warn` gets a line if it fails.

    Example:
        >>> import tempfile
        >>> profile = Profile(tempfile.mkdtemp(), (2, 3))
        >>> for step in range(1, 5):
        ...     with profile.around(step):
        ...         _ = tf.linalg.matmul(tf.ones([2, 2]), tf.ones([2, 2]))
        ...     print(step, profile.written is not None)
        1 False
        2 False
        3 True
        4 True
    """

    def __init__(
        self,
        folder: str,
        steps: tuple[int, int] | None,
        warn: Callable[[str], object] = print,
    ) -> None:
        self._folder, self._steps, self._warn = os.path.abspath(folder), steps, warn
        self._runs = False
        self._before: set[str] = set()
        self.written: str | None = None

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Encloses a step; the profile starts before the block and ends after it."""
        first, last = self._steps or (0, -1)
        if not first <= step <= last:
            yield
            return
        if not self._runs:
            self._begin()
        try:
            # Marks the start and end of a step for the profiler.
            with tf.profiler.experimental.Trace("train", step_num=step, _r=1):
                yield
        finally:
            if step == last:
                self.close()

    def _begin(self) -> None:
        self._before = self._files()
        try:
            tf.profiler.experimental.start(self._folder)
            self._runs = True
        except (OSError, tf.errors.OpError) as error:
            self._fail(reason(error))

    def close(self) -> None:
        """Writes an unfinished profile."""
        if not self._runs:
            return
        self._runs, self._steps = False, None
        try:
            tf.profiler.experimental.stop()
        except (OSError, tf.errors.OpError) as error:
            self._fail(reason(error))
            return
        # TensorFlow does not report that it could not write the profile.
        if new := self._files() - self._before:
            self.written = os.path.dirname(max(new))
        else:
            self._fail("nothing was written")

    def _fail(self, why: str) -> None:
        self._steps = None
        self._warn(f"there is no profile ({why}); training goes on")

    def _files(self) -> set[str]:
        pattern = os.path.join(glob.escape(os.path.join(self._folder, _FOLDER)), "*", "*.xplane.pb")
        return {path for path in glob.glob(pattern) if os.path.getsize(path)}
