"""A Python function traced once, whose use of the outside is known and can be rewired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent.captures import name_of
from pipemesh.recurrent.purity import check_pure


class TracedFunction:
    """A function of flat tensors, called once with symbolic ones.

    Args:
        run: takes tensors and returns nested tensors, None, or IndexedSlices.
        specs: shapes and dtypes of what it takes.
        what: names it in errors.

    Attributes:
        captures: the tensors from outside that it uses.
        results: what it returned, as symbolic tensors.

    Raises:
        PipelineError: it reads variables.
    """

    def __init__(self, run: Callable[..., Any], specs: Sequence[tf.TensorSpec], what: str) -> None:
        self._function = tf.function(run, autograph=False).get_concrete_function(*specs)
        graph = self._function.graph
        self.captures: list[tf.Tensor] = list(self._function.captured_inputs)
        self.results: Any = graph.structured_outputs
        self._variables = {id(v.handle): v.name for v in graph.variables}
        for tensor in self.captures:
            if tensor.dtype == tf.resource or _is_ref_variable(tensor):
                raise PipelineError(
                    f"{what} reads the variable or resource {self.name_of(tensor)!r} by itself; "
                    "pass the variable in as part of theta, so that it gets its gradient and has "
                    "the same value in the backward pass; if it is the step that random numbers "
                    "are keyed by, enter pipemesh.lowering.random.plan_free_randomness(step) "
                    "around Recurrent"
                )

    def check_pure(self, what: str) -> None:
        """Raises if it has side effects or state, so that it must not be computed twice."""
        check_pure(
            self._function.graph.as_graph_def(),
            what,
            "the backward pass computes the cell again and must find the same",
            effects=False,
        )

    def used_arguments(self) -> set[int]:
        """The numbers of the arguments that anything it returns depends on."""
        arguments = {x.op: number for number, x in enumerate(self._function.graph.inputs)}
        todo = [
            x.op for x in tf.nest.flatten(self.results, expand_composites=True) if x is not None
        ]
        seen = set(todo)
        while todo:
            operation = todo.pop()
            sources = {*(x.op for x in operation.inputs), *operation.control_inputs} - seen
            seen |= sources
            todo.extend(sources)
        return {number for operation, number in arguments.items() if operation in seen}

    def name_of(self, capture: tf.Tensor) -> str:
        """A name for one of `captures`; eager tensors have none of their own."""
        return name_of(capture, self._variables)

    def __call__(self, *arguments: tf.Tensor, captures: Sequence[tf.Tensor] | None = None) -> Any:
        """Calls it, with other values for `captures` if given."""
        if captures is None:
            return self._function(*arguments)
        self._function.set_external_captures(list(captures))
        try:
            return self._function(*arguments)
        finally:
            self._function.set_external_captures(self.captures)


def _is_ref_variable(tensor: Any) -> bool:
    return getattr(getattr(tensor, "op", None), "type", None) in ("Variable", "VariableV2")
