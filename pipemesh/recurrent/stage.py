"""A stage as the executor sees it: a function of flat lists of tensors, and its home."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent.home import Home

Tensors = Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Stage:
    """What runs as one unit.

    Attributes:
        name: names the stage in errors and in the graph.
        forward: `forward(theta, carry, inputs, microbatch, step) -> (outputs, carry)`, all lists
            of tensors but the last two, which are int64 scalars: the index of the microbatch and
            the global step. It must be free of side effects and may be traced more than once.
            `carry` goes from one microbatch of the stage to the next. With several replicas it is
            called for each, as if the parts of microbatches were microbatches themselves.
        theta: the weights; gradients flow to the floating ones, but for `copies`.
        carry: its value before the first microbatch.
        home: where it runs; names of TensorFlow devices, one or several, are a home, too.
        dtypes: for each of `theta` the dtype that the stage computes with; by default the
            pipeline's `compute_dtype`.
        places: for each of `theta` the number of the home's device that it lies on, and where its
            gradients are summed up; by default all on the first one. Other replicas have a copy at
            the same place among theirs.
        copies: numbers of those of `theta` that are another one's copy on another device of its
            replica, with the number of the other one. That one's gradient is the whole gradient;
            copies have none.
        fetched: numbers of those of `theta` that other replicas have no copy of: an action that
            uses one gets it from where it lies, and lets go of it. They are sent once an action
            and replica, not once a step; gradients are summed and sent as those of the others are.
        arrivals: asked once the stage before is traced, for each of its outputs the number of the
            device, of a replica here, that takes it. By default that of the number that it has
            there, counted around where a replica here has fewer devices.
        recurrent: whether gradients flow through the carry, from each microbatch back to the one
            before and at last to `carry`. If not, the carry is a mere count of what was seen.
            Where the schedule has slices, it goes from slice to slice instead, and starts anew
            with each microbatch: give `carry` the rows of one.
        takes_slices: whether its function may be given a slice of the sequences, which
            `current_slice` names: it works position by position or, if it is recurrent, with what
            slices before have put into the carry. Schedules with slices run no other stages.
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
        """The home, which may have been given as names."""
        return Home.of(self.home)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of its replicas, those of the first one first."""
        return self.of_home.devices

    @property
    def device(self) -> str:
        """The first of them."""
        return self.devices[0]

    @property
    def owners(self) -> Sequence[int]:
        """For each of `theta` the number of the home's device that it lies on."""
        assert self.places is not None
        return self.places

    @property
    def theta_places(self) -> Sequence[int]:
        """For each of `theta` on which of a replica's devices it, or its copy, lies."""
        return [owner % self.of_home.group for owner in self.owners]

    def input_places(self, before: Sequence[int]) -> list[int]:
        """On which of a replica's devices its inputs lie.

        Args:
            before: on which of a replica's devices the stage before has them.

        Raises:
            PipelineError: `arrivals` gives others than the devices, or not one for each.
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
        """The numbers of the home's devices that hold one of `theta`, or a copy, all the time."""
        owner, home = self.owners[number], self.of_home
        if number in self.fetched:
            return range(owner, owner + 1)
        return range(owner % home.group, len(home), home.group)

    @property
    def theta_devices(self) -> list[str]:
        """For each of `theta` the device that it lies on."""
        return [self.devices[owner] for owner in self.owners]
