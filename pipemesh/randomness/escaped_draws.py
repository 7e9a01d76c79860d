"""Random numbers that no scope has seen."""

from __future__ import annotations

import tensorflow as tf

from pipemesh.backend.functions import operations_within
from pipemesh.backend.operation_kinds import DRAWS_WITH_STATE, DRAWS_WITHOUT_STATE
from pipemesh.backend.operations import is_marked
from pipemesh.errors import PipelineError
from pipemesh.randomness.draws import KEYED


def check_no_draw_escaped(graph: tf.Graph, stage: str, num_microbatches: int) -> None:
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
    wanted = DRAWS_WITH_STATE | DRAWS_WITHOUT_STATE if num_microbatches > 1 else DRAWS_WITH_STATE
    for inside, operation in operations_within(graph):
        if operation.type not in wanted or is_marked(operation, KEYED):
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
            if operation.type in DRAWS_WITH_STATE
            else "would be the same for every microbatch"
        )
        raise PipelineError(
            f"stage {stage!r} draws random numbers by {operation.name!r}, a {operation.type} "
            f"operation{where} of which the pipeline does not know: they {trouble}; {advice}, or "
            "pass the numbers in as an input"
        )
