"""The params that a pipelined stack adds to those of a stack."""

from __future__ import annotations

from typing import Any

from pipemesh.schedule.names import listing


def define_pipelining(p: Any) -> None:
    """Defines microbatches, the schedule, recomputation and checks."""
    p.Define("num_micro_batches", 1, "Number of microbatches; must divide the batch.")
    p.Define("micro_batch_size", None, "Size of a microbatch; given or derived.")
    p.Define("batch_dim", 0, "The batch dimension of all inputs and outputs.")
    p.Define(
        "state_dtype",
        None,
        "If set, floating tensors between stages and returned ones have this dtype.",
    )
    p.Define("nested_map_fprop", False, "Whether the stages take and return exactly one NestedMap.")
    p.Define(
        "schedule",
        "gpipe",
        f"The order of actions on each device, by name: {listing(for_layers=True)}; or a Schedule. "
        "All but gpipe and looped_bfs need the loss inside the pipeline (loss_inside).",
    )
    p.Define(
        "loss_inside",
        False,
        "Whether the last layer is a head, which returns the loss of its microbatch, summed "
        "over examples or tokens; the summed weight; and metrics to look at, if any. FProp "
        "then returns the same for the whole batch: metrics with a batch dim are joined, "
        "scalar ones become a vector with one element a microbatch (with replicas, one for "
        "each replica's part of it). Only the loss has a gradient.",
    )
    p.Define(
        "aux_loss_microbatch_accumulation",
        None,
        "What becomes of scalars that layers add to an AuxLossContext around the pipeline: 'mean' "
        "or 'sum' of those of all microbatches (and replicas). It must be what the layers do with "
        "the examples of a batch; then the loss is that of the plain stack.",
    )
    p.Define(
        "remat",
        "full",
        "What is computed again in the backward pass: 'full' keeps only the inputs of each "
        "stage, 'none' keeps all that is needed, 'except_last' computes nothing again for a "
        "microbatch whose backward pass follows its forward pass at once, 'twice' is as 'full' "
        "but keeps less between the halves of a split backward pass, and Selective(predicate) "
        "computes the layers again whose name the predicate picks. 'full,none', or "
        "ByStage(policies), gives each stage its own.",
    )
    p.Define(
        "loop",
        None,
        "True: the schedule is one loop of the graph, which then grows with the number of stages "
        "only. False: each action has operations of its own. None: chosen by size; see Options.",
    )
    p.Define("rolled", None, "Old name of loop, for one release.")
    p.Define(
        "check_numerics",
        None,
        "'results' makes it an error if the loss (without loss_inside, an output) or a "
        "gradient is not finite, 'all' also says in which layer and microbatch that began; "
        "'loss' and 'forward' are the same without gradients, as needed if the loss is scaled "
        "until they overflow; 'off' checks nothing. By default 'loss' if the stages compute in "
        "float16, else 'results'; where FProp is called eagerly, 'forward' or 'all', if the "
        "lowering is 'placement'.",
    )
    p.Define(
        "lowering",
        "placement",
        "How the stages run: 'placement' by the schedule's actions, each an operation of its "
        "own, or 'simd' as one loop over ticks, for stages that are alike but for their names. "
        "With loss_inside all devices compute what stands before and behind the alike layers, "
        "which have named dims.",
    )
    p.Define(
        "pipelined",
        True,
        "False runs the whole batch through one stage after the other, as SeqLayer does, for "
        "comparison.",
    )
    p.Define(
        "strict_devices",
        False,
        "Whether an operation of a stage that is pinned to another device, or has no kernel "
        "for the device of its stage, is an error.",
    )
