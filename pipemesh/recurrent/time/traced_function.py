"""A Python function traced once, whose outside tensors are known and replaceable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operation_kinds import REF_VARIABLES, check_pure
from pipemesh.errors import PipelineError
from pipemesh.recurrent.passes.captures import name_of
from pipemesh.recurrent.time.outside_reads import OutsideReads


class TracedFunction:
    """A function of flat tensors, called once with symbolic ones.

    Args:
        run: takes tensors and returns nested tensors, None, or IndexedSlices.
        specs: shapes and dtypes of its arguments.
        what: names it in errors.

    Attributes:
        captures: the outside tensors that it uses; for a variable, its value.
        results: its results, as symbolic tensors.

    Raises:
        PipelineError: a branch or a loop in it reads variables, or it writes them, or it uses other
            resources.
    """

    def __init__(self, run: Callable[..., Any], specs: Sequence[tf.TensorSpec], what: str) -> None:
        reads = OutsideReads()

        def run_with_reads(*arguments: tf.Tensor) -> Any:
            with reads.instead():
                return run(*arguments)

        function = tf.function(run_with_reads, autograph=False)
        self._function = function.get_concrete_function(*specs)
        graph = self._function.graph
        names = {id(v.handle): v.name for v in graph.variables}
        self._variables: dict[int, str] = {}
        self.captures: list[tf.Tensor] = []
        for tensor in self._function.captured_inputs:
            if tensor.dtype == tf.resource:
                # If the function writes it, this check reports that.
                self.check_pure(what)
                raise PipelineError(
                    f"{what} reads the variable or resource {name_of(tensor, names)!r} in a branch "
                    "or a loop; read it before that"
                )
            value = tensor
            if (found := reads.read(tensor)) is not None:
                handle, value = found
                self._variables[id(value)] = name_of(handle, names)
            elif _is_ref_variable(tensor):
                # A TF1 variable that is not a resource.
                value = tf.identity(tensor)
                self._variables[id(value)] = tensor.name
            self.captures.append(value)
        self._function.set_external_captures(self.captures)
        # Else callers would assume that the function still reads these variables.
        graph.variables = ()
        self.results: Any = graph.structured_outputs

    def check_pure(self, what: str) -> None:
        """Raises if it has side effects or state, so that it must not be computed twice."""
        check_pure(
            self._function.graph.as_graph_def(),
            what,
            "the backward pass computes the cell again and must find the same",
            effects=False,
        )

    def used_arguments(self) -> set[int]:
        """Returns the indices of the arguments that any result depends on."""
        results = tf.nest.flatten(self.results, expand_composites=True)
        return self._arguments_of(x.op for x in results if x is not None)

    def draws(self) -> Iterator[set[int]]:
        """Returns for each random draw the indices of the arguments that it depends on.

        Captures count as arguments, after the others.
        """
        for operation in self._function.graph.get_operations():
            if operation.type.startswith("StatelessRandom"):
                yield self._arguments_of([operation])

    def _arguments_of(self, operations: Iterable[tf.Operation]) -> set[int]:
        arguments = {x.op: number for number, x in enumerate(self._function.graph.inputs)}
        todo = list(operations)
        seen = set(todo)
        while todo:
            operation = todo.pop()
            sources = {*(x.op for x in operation.inputs), *operation.control_inputs} - seen
            seen |= sources
            todo.extend(sources)
        return {number for operation, number in arguments.items() if operation in seen}

    def is_variable(self, capture: tf.Tensor) -> bool:
        """Returns True if one of `captures` is the value of a variable."""
        return id(capture) in self._variables

    def name_of(self, capture: tf.Tensor) -> str:
        """Returns a name for one of `captures`; eager tensors have no name."""
        return name_of(capture, self._variables)

    def __call__(self, *arguments: tf.Tensor, captures: Sequence[tf.Tensor] | None = None) -> Any:
        """Calls the function, with other values for `captures` if given."""
        if captures is None:
            return self._function(*arguments)
        self._function.set_external_captures(list(captures))
        try:
            return self._function(*arguments)
        finally:
            self._function.set_external_captures(self.captures)


def _is_ref_variable(tensor: tf.Tensor) -> bool:
    return getattr(getattr(tensor, "op", None), "type", None) in REF_VARIABLES
