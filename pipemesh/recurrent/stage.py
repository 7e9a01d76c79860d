"""A stage: its function, the devices that own it, and what its function is called for."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import custom_gradient
from pipemesh.backend.static_shape import static_sizes
from pipemesh.backend.structure import setting
from pipemesh.errors import DeviceError, PipelineError
from pipemesh.plan.slices import Span

Tensors = list[tf.Tensor]
Grads = list[tf.Tensor | None]
Inputs = Sequence[tf.Tensor]
# Tensors, or specs of what a stage writes before it reads it.
Carry = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Home:
    """The devices of a stage.

    Each replica has a copy of the weights and computes the same number of neighbouring examples of
    every microbatch. A replica may have several devices; the stage divides its work among them with
    `current_devices`. Undivided tensors lie on the first device of the replica. Tensors that all
    replicas share, such as a sum, lie on the first device of the home.

    Attributes:
        devices: names of TensorFlow devices, ordered by replica.
        num_replicas: number of replicas; by default one per device.

    Raises:
        DeviceError: there is no device, a name is not a string, or the number of devices is not a
            multiple of the number of replicas.

    Example:
        >>> home = Home(("GPU:0", "GPU:1"))
        >>> home.first, len(home), str(home)
        ('GPU:0', 2, 'GPU:0, GPU:1')
        >>> home = Home(("GPU:0", "GPU:1", "GPU:2", "GPU:3"), num_replicas=2)
        >>> home.replica(1)
        ('GPU:2', 'GPU:3')
    """

    devices: tuple[str, ...]
    num_replicas: int = 0

    def __post_init__(self) -> None:
        argument: Any = self.devices
        devices = [argument] if isinstance(argument, str) else argument
        known = isinstance(devices, Iterable) and tuple(devices)
        if not known or not all(isinstance(device, str) for device in known):
            raise DeviceError(
                f"a home has the devices {argument!r}; give names of one or several, for "
                "example ('GPU:0', 'GPU:1')"
            )
        object.__setattr__(self, "devices", known)
        object.__setattr__(self, "num_replicas", self.num_replicas or len(known))
        if len(known) % self.num_replicas:
            raise DeviceError(
                f"a home has {len(known)} devices ({self}) and {self.num_replicas} replicas; give "
                "each replica as many devices"
            )

    @classmethod
    def of(cls, given: Home | str | Sequence[str]) -> Home:
        """Returns a home for a device or several; a `Home` is returned as it is.

        Raises:
            DeviceError: the argument is not a home or device names.
        """
        return given if isinstance(given, Home) else cls(given)  # type: ignore[arg-type]

    @property
    def first(self) -> str:
        """The device of every tensor that is not split."""
        return self.devices[0]

    @property
    def group(self) -> int:
        """The number of devices of a replica."""
        return len(self.devices) // self.num_replicas

    def replica(self, number: int) -> tuple[str, ...]:
        """Returns the devices of a replica."""
        return self.devices[number * self.group :][: self.group]

    def __len__(self) -> int:
        return len(self.devices)

    def __str__(self) -> str:
        return ", ".join(self.devices)


_current_devices: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "devices", default=()
)


def calling_on(devices: tuple[str, ...]) -> contextlib.AbstractContextManager[Any]:
    """Sets the devices that `current_devices` returns inside the context."""
    return setting(_current_devices, devices)


def current_devices() -> tuple[str, ...]:
    """Returns the devices of the replica that calls the stage's function; outside of a stage, none.

    The function runs in the device scope of the first device. It places operations on the others
    with `tf.device`; the functions that are cut from its graph keep them there.
    """
    return _current_devices.get()


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
        carry: its value before the first microbatch. If the schedule has slices, a `tf.TensorSpec`
            may stand for what the function writes before it reads it, in each microbatch. If
            slices differ in length, each call may return more of it than it gets; then this is
            empty.
        home: the devices of the stage, a `Home` or names of TensorFlow devices.
        dtypes: for each of `theta` the dtype of computation; by default the pipeline's
            `compute_dtype`.
        places: for each of `theta` the index of its device in the home, where its gradients are
            summed, too; by default 0. Other replicas have a copy at the same index among their
            devices.
        copies: maps the index of a weight that is a copy on another device of its replica to the
            index of the original. The original gets the whole gradient; copies get none.
        fetched: indices of the weights without a copy on other replicas. A stage that is alone on
            its devices fetches them once per step, joins what its function joins with nothing else
            (slices, by `tf.concat`), and frees them after their last use. If its home has other
            stages too, each action fetches them and frees them afterwards. Gradients are summed and
            sent like the others.
        arrivals: called once the previous stage is traced; returns for each of its outputs the
            index of the device, within a replica of this stage, that takes it. By default the index
            stays the same, modulo the number of devices of a replica here.
        recurrent: True if gradients flow through the carry, from each microbatch back to the
            previous one and finally to `carry`. If False, the carry only accumulates statistics. If
            the schedule has slices, the carry goes from slice to slice and is reset for each
            microbatch: `carry` then has the rows of one microbatch, or of a replica's part of it,
            and each replica has its own.
        takes_slices: True if the function accepts a sequence slice (see `current_slice`). It must
            work position by position or, if it is recurrent, with the results that earlier slices
            put into the carry. Schedules with slices require it.
        carry_places: for each of `carry` the index, in each replica, of the device that keeps it;
            by default 0.
    """

    name: str
    forward: Callable[
        [Inputs, Inputs, Inputs, tf.Tensor, tf.Tensor | None],
        tuple[list[tf.Tensor], list[tf.Tensor]],
    ]
    theta: Inputs
    carry: Carry
    home: Home | str | Sequence[str]
    recurrent: bool = False
    dtypes: Sequence[tf.DType] | None = None
    places: Sequence[int] | None = None
    copies: Mapping[int, int] = dataclasses.field(default_factory=dict)
    fetched: frozenset[int] = frozenset()
    arrivals: Callable[[], Sequence[int]] | None = None
    takes_slices: bool = False
    carry_places: Sequence[int] | None = None

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


@dataclasses.dataclass(frozen=True)
class Slice:
    """The part of its sequences that a stage's function gets.

    Attributes:
        index: int64 scalar, from 0; of equal slices one of `n` positions begins at `index * n`.
        count: number of slices; 1 for whole sequences.
        span: the positions of the slice if slices differ in length: the function is then traced
            for each of them. None if one trace serves all slices.
    """

    index: tf.Tensor | int
    count: int
    span: Span | None = None

    def begin(self, length: int) -> tf.Tensor | int:
        """Returns the first position, in its sequence, of a slice of so many positions."""
        if self.span is not None:
            return self.span.begin
        return 0 if self.count == 1 else self.index * length

    def whole(self, length: int) -> int:
        """Returns the length of the sequences whose slice has so many positions."""
        return length * self.count if self.span is None else self.span.whole


# And True if the carry belongs to one microbatch, so that it can be reset.
_current_call: contextvars.ContextVar[tuple[Slice, bool] | None] = contextvars.ContextVar(
    "slice", default=None
)


def calling_for(
    index: tf.Tensor | int, count: int, is_piece: bool = True, span: Span | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Sets the slice that `current_slice` returns; `is_piece` is False for the whole batch."""
    return setting(_current_call, (Slice(index, count, span), is_piece))


def current_slice() -> Slice:
    """Returns the slice that a stage's function is called for; by default the whole sequence.

    Example:
        >>> from pipemesh.recurrent.stage import current_slice
        >>> current_slice().count
        1
    """
    call = _current_call.get()
    return Slice(tf.constant(0, tf.int64), 1) if call is None else call[0]


def write_slice(past: tf.Tensor, new: tf.Tensor, dim: int) -> tf.Tensor:
    """Writes the current slice into a tensor of whole sequences, at its positions.

    A layer of causal attention can so keep keys and values of whole length as its carry. Its
    queries attend to all positions up to their own. Shapes stay static, as the executor requires.

    Args:
        past: the tensor of whole sequences, of any shape.
        new: the tensor of the current slice; like `past`, but shorter along `dim`.
        dim: the dim of the positions.

    Returns:
        A tensor of the shape of `past`.

    Raises:
        PipelineError: the lengths do not fit, or are not static.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.recurrent.stage import calling_for, write_slice
        >>> with calling_for(tf.constant(1, tf.int64), 3):
        ...     write_slice(tf.zeros([6]), tf.constant([1.0, 2.0]), 0).numpy().tolist()
        [0.0, 0.0, 1.0, 2.0, 0.0, 0.0]
    """
    sizes, own, piece = past.shape.as_list(), new.shape.as_list(), current_slice()
    length = own[dim] or 0
    if None in own or [*own[:dim], piece.whole(length), *own[dim + 1 :]] != sizes:
        raise PipelineError(
            f"a slice of shape {new.shape} is written into {past.shape} along dim {dim}; give it "
            f"the same shape but for the length there, which is that of {piece.count} slices, all "
            "of it known before the step runs"
        )
    if piece.count == 1:
        return new
    begin, every = tf.cast(piece.begin(length), tf.int64), (slice(None),) * dim

    def put(whole: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
        before = whole[(*every, slice(None, begin))]
        after = whole[(*every, slice(begin + length, None))]
        return tf.ensure_shape(tf.concat([before, part, after], dim), sizes)

    # The shapes of TensorFlow's own gradient would be unknown before the step.
    @custom_gradient
    def written(past: tf.Tensor, new: tf.Tensor) -> Any:
        def backward(grad: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            first = tf.one_hot(dim, len(sizes), begin, tf.constant(0, tf.int64))
            part = tf.slice(grad, first, tf.constant(static_sizes(new), tf.int64))
            return put(grad, tf.zeros_like(new)), tf.ensure_shape(part, own)

        return put(past, new), backward

    return written(past, new)


def starting_anew(stage: Stage) -> Stage:
    """Returns a recurrent stage whose carry is reset at the first slice of each microbatch.

    In the backward pass, the gradient from the next microbatch is then zero. The gradient that
    leaves the first slice belongs to the initial carry and is summed over microbatches.
    """
    initial = [
        None if isinstance(t, tf.TensorSpec) else tf.convert_to_tensor(t) for t in stage.carry
    ]
    if not any(t is not None for t in initial):
        return stage

    def forward(theta: Any, carry: Any, *rest: Any) -> Any:
        call = _current_call.get()
        if call is not None and call[1] and call[0].count > 1:
            begins = tf.equal(call[0].index, 0)
            carry = [
                b if a is None else tf.where(begins, a, b)
                for a, b in zip(initial, carry, strict=True)
            ]
        return stage.forward(theta, carry, *rest)

    return dataclasses.replace(stage, forward=forward)
