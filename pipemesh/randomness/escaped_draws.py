"""Random numbers that no scope has seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipemesh.backend.called_functions import called_functions
from pipemesh.errors import PipelineError
from pipemesh.randomness.draws import KEYED

_STATEFUL = frozenset(
    """
    Multinomial ParameterizedTruncatedNormal RandomGamma RandomPoisson RandomPoissonV2 RandomShuffle
    RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal
    """.split()
)
_STATELESS = frozenset(
    """
    StatelessMultinomial StatelessParameterizedTruncatedNormal StatelessRandomBinomial
    StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomNormal StatelessRandomNormalV2
    StatelessRandomPoisson StatelessRandomUniform StatelessRandomUniformFullInt
    StatelessRandomUniformFullIntV2 StatelessRandomUniformInt StatelessRandomUniformIntV2
    StatelessRandomUniformV2 StatelessShuffle StatelessTruncatedNormal StatelessTruncatedNormalV2
    """.split()
)


def check_no_draw_escaped(graph: Any, stage: str, num_microbatches: int) -> None:
    """Checks that all random numbers in a traced stage are those of the plan.

    Others come from functions that were traced before, outside of the scope, and cannot be traced
    again: a `ConcreteFunction`, a function out of a SavedModel; or from `tf.raw_ops`.

    Args:
        graph: of the stage.
        stage: its name.
        num_microbatches: into how many the batch is cut.

    Raises:
        PipelineError: a draw has state, so that to compute it again would give other numbers; or
            it would give the same numbers to every microbatch.
    """
    wanted = _STATEFUL | _STATELESS if num_microbatches > 1 else _STATEFUL
    for inside, operation in _operations(graph, ()):
        if operation.type not in wanted or _is_keyed(operation):
            continue
        if not inside:
            where, advice = "", "call the function of tf.random instead of tf.raw_ops"
        else:
            where = f" in the function {inside[-1]!r}, which was traced outside of the pipeline,"
            advice = (
                "call the tf.function itself instead of a ConcreteFunction of it or of a SavedModel"
            )
        trouble = (
            "would be others when the stage is computed again"
            if operation.type in _STATEFUL
            else "would be the same for every microbatch"
        )
        raise PipelineError(
            f"stage {stage!r} draws random numbers by {operation.name!r}, a {operation.type} "
            f"operation{where} of which the pipeline does not know: they {trouble}; {advice}, or "
            "pass the numbers in as an input"
        )


def _operations(graph: Any, inside: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    seen: set[int] = set()
    for operation in graph.get_operations():
        yield inside, operation
        for function in called_functions(graph, operation):
            if id(function) not in seen:
                seen.add(id(function))
                yield from _operations(function, (*inside, function.name))


def _is_keyed(operation: Any) -> bool:
    try:
        return operation.get_attr(KEYED)
    except ValueError:
        return False
