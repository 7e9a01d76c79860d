"""A stage for the executor: a function of flat lists of tensors, and its home."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent.home import Home

Tensors = Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Stage:
    """The unit of work that runs on one home.

    Attributes:
        name: names the stage in errors and in the graph.
        forward: `forward(theta, carry, inputs, microbatch, step) -> (outputs, carry)`. All are
            lists of tensors, except the int64 scalars `microbatch` (index) and `step` (global
            step). It must have no side effects and may be traced more than once. The executor
            passes `carry` from each microbatch of the stage to the next. With several replicas it
            calls the function for each, as if the parts of microbatches were microbatches.
        theta: the weights. Gradients flow to the floating ones, except `copies`.
        carry: its value before the first microbatch.
        home: the devices of the stage, a `Home` or names of TensorFlow devices.
        dtypes: for each of `theta` the dtype of computation; by default the pipeline's
            `compute_dtype`.
        places: for each of `theta` the index of its device in the home, where its gradients are
            summed, too; by default 0. Other replicas have a copy at the same index among their
            devices.
        copies: maps the index of a weight that is a copy on another device of its replica to the
            index of the original. The original gets the whole gradient; copies get none.
        fetched: indices of the weights without a copy on other replicas. An action fetches such a
            weight from its device and frees it afterwards. It is sent once per action and replica
            instead of once per step. Its gradients are summed and sent like the others.
        arrivals: called once the previous stage is traced; returns for each of its outputs the
            index of the device, within a replica of this stage, that takes it. By default the index
            stays the same, modulo the number of devices of a replica here.
        recurrent: True if gradients flow through the carry, from each microbatch back to the
            previous one and finally to `carry`. If False, the carry only accumulates statistics. If
            the schedule has slices, the carry goes from slice to slice and is reset for each
            microbatch: `carry` then has the rows of one microbatch.
        takes_slices: True if the function accepts a sequence slice (see `current_slice`). It must
            work position by position or, if it is recurrent, with the results that earlier slices
            put into the carry. Schedules with slices require it.
    """

    name: str
    forward: Callable[
        [Tensors, Tensors, Tensors, tf.Tensor, tf.Tensor | None],
        tuple[list[tf.Tensor], list[tf.Tensor]],
    ]
    theta: Tensors
    carry: Tensors
    home: Home | str | Sequence[str]
    recurrent: bool = False
    dtypes: Sequence[tf.DType] | None = None
    places: Sequence[int] | None = None
    copies: Mapping[int, int] = dataclasses.field(default_factory=dict)
    fetched: frozenset[int] = frozenset()
    arrivals: Callable[[], Sequence[int]] | None = None
    takes_slices: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", Home.of(self.home))
        places = [0] * len(self.theta) if self.places is None else list(self.places)
        object.__setattr__(self, "places", places)
        count = len(self.of_home)
        if len(places) != len(self.theta) or not all(0 <= place < count for place in places):
            raise PipelineError(
                f"stage {self.name!r} has {len(self.theta)} weights and the places {places}; give "
                f"one for each, from 0 to {count - 1} (its home has {count} devices)"
            )
        wrong = sorted(i for i in self.fetched if i in self.copies or not 0 <= i < len(places))
        if wrong:
            raise PipelineError(
                f"stage {self.name!r} fetches {wrong}; give numbers of its {len(places)} weights, "
                "from 0 on, but of none that is another one's copy"
            )

    @property
    def of_home(self) -> Home:
        """The home, also if it was given as device names."""
        return Home.of(self.home)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of its replicas, ordered by replica."""
        return self.of_home.devices

    @property
    def device(self) -> str:
        """The first device of the home."""
        return self.devices[0]

    @property
    def owners(self) -> Sequence[int]:
        """For each of `theta` the index of its device in the home."""
        assert self.places is not None
        return self.places

    @property
    def theta_places(self) -> Sequence[int]:
        """For each of `theta` the index, in each replica, of the device with it or its copy."""
        return [owner % self.of_home.group for owner in self.owners]

    def input_places(self, before: Sequence[int]) -> list[int]:
        """Returns for each input the index of its device within a replica.

        Args:
            before: the same indices for the outputs of the previous stage.

        Raises:
            PipelineError: `arrivals` returns an invalid index, or not one for each output.
        """
        group = self.of_home.group
        if self.arrivals is None:
            return [place % group for place in before]
        places = list(self.arrivals())
        if len(places) != len(before) or not all(0 <= place < group for place in places):
            raise PipelineError(
                f"stage {self.name!r} takes {len(before)} tensors and its arrivals are {places}; "
                f"give one for each, from 0 to {group - 1} (its replicas have {group} devices)"
            )
        return places

    def holders(self, number: int) -> range:
        """Returns the devices of the home, by index, that always hold a weight or its copy."""
        owner, home = self.owners[number], self.of_home
        if number in self.fetched:
            return range(owner, owner + 1)
        return range(owner % home.group, len(home), home.group)

    @property
    def theta_devices(self) -> list[str]:
        """For each of `theta` its device."""
        return [self.devices[owner] for owner in self.owners]
