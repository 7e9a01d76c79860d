"""A stack of stages, each on its device, without pipelining."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import lingvo.compat as tf
from lingvo.core import base_layer, py_utils

from pipemesh import randomness
from pipemesh.errors import LayoutError
from pipemesh.layers.check_params import (
    check_distinct,
    check_flags,
    check_floating,
    check_layers,
    check_theta,
)
from pipemesh.layers.feature_extraction import (
    FeatureExtractionLayer,
    check_weights_are_its_own,
    noted,
    to_tuple,
    with_distinct_names,
)
from pipemesh.layers.mesh_cluster import mesh_of, stage_homes, warn_of_places
from pipemesh.layers.named.scope import exported
from pipemesh.layers.pipeline.stage import StageLowering
from pipemesh.layers.pipeline.weights import spread_weights, tie_weights, with_given_weights
from pipemesh.layers.step_seed import name_in_task, step_of_call, whole_batch_randomness
from pipemesh.randomness.scope import layer_aliases
from pipemesh.recurrent import Home


class SeqLayer(base_layer.BaseLayer):
    """A stack that runs `before_tpl`, then the stages of `cell_tpl` one by one on their devices.

    Weights are valid under another partition; see `FeatureExtractionLayer`.

    Random numbers are keyed by the global step, the layer inside, this layer's path in its model
    without the model's name, and the number of earlier calls of `FProp` in the same graph, or
    eagerly under the same tape.

    Example:
        >>> from lingvo.core import layers
        >>> dense = layers.FCLayer.Params().Set(name="dense", input_dim=4, output_dim=4)
        >>> stage = FeatureExtractionLayer.Params().Set(name="stage0", sub=[dense])
        >>> params = SeqLayer.Params().Set(name="stack", cell_tpl=[stage])
    """

    # The homes on the last cluster: errors may be explained after the cluster is left.
    homes: list[Home] | None = None

    @classmethod
    def Params(cls) -> Any:
        """Defines the layers, the mesh, the layout and tied weights."""
        p = super().Params()
        p.Define("before_tpl", [], "Params of layers that run on the whole batch, first.")
        p.Define("cell_tpl", [], "A list of FeatureExtractionLayer params: the stages.")
        p.Define(
            "mesh_shape",
            None,
            "A mesh, such as 'layers:2;data:2', of the devices of the cluster's model split; by "
            "default that of `mesh_cluster`, or one device a stage.",
        )
        p.Define("layout", None, "Rules for batch and named dims; default: of `mesh_cluster`.")
        p.Define(
            "tied_weights",
            {},
            "Weights that named layers take from others, as {'softmax.w': 'embedding.table'}.",
        )
        p.Define("allow_idle", False, "Whether mesh_shape may have axes that nothing uses.")
        return p

    def __init__(self, params: Any) -> None:
        check_floating(params.name, "fprop_dtype", params.fprop_dtype)
        # The next line copies the params, and a live layer cannot always be copied.
        check_layers(params.name, "before_tpl", params.before_tpl)
        check_layers(params.name, "cell_tpl", params.cell_tpl)
        super().__init__(params)
        p = self.params
        check_flags(p, ["allow_idle"])
        check_distinct(p.name, before_tpl=p.before_tpl, cell_tpl=p.cell_tpl)
        # A TF1 trainer places variables itself; otherwise they are placed with their stage.
        pinned = py_utils.use_tpu() or py_utils.IsEagerMode()
        homes = self.StageHomes() if pinned else []
        tpls, random_names = with_distinct_names([*p.before_tpl, *p.cell_tpl])
        tpls = with_given_weights(p.name, p.tied_weights, tpls)
        names = [tpl.name for tpl in tpls]
        num_before = len(p.before_tpl)
        # The names of the stages are those in `children` and `theta`.
        self._before_names, self.stage_names = names[:num_before], names[num_before:]
        self._random_names = dict(zip(names, random_names, strict=True))
        mesh, layout = mesh_of(self.cluster, p)
        # The splits of named dims inside a replica of each stage.
        self.stage_lowerings = [StageLowering(mesh, layout, place) for place in self._places()]
        first = self.stage_lowerings[0]
        if first.replica_cut is not None and not py_utils.IsEagerMode():
            raise LayoutError(
                f"{p.name}: layout '{layout}' cuts weights over the axis that "
                "the batch is split over, but in a TF1 graph lingvo's trainer places variables, "
                "each as one; use TF2 (py_utils.SetEagerMode(True)), or leave rules for that axis "
                "out but for the batch's"
            )
        for tpl in tpls[:num_before]:
            with tf.device(homes[0].first if pinned else ""):
                self.CreateChild(tpl.name, tpl)
        if not pinned:
            # Without splits it may be made and called under different clusters.
            splits = first.replica_mesh is not None
            homes = self.StageHomes() if splits else [Home(("",))] * len(p.cell_tpl)
        self._create_cells(tpls[num_before:], homes, pinned)
        cells = [self.children[name] for name in self.stage_names]
        if p.tied_weights:
            meshes = [lowering.replica_mesh for lowering in self.stage_lowerings]
            before = [self.children[name] for name in self._before_names]
            with self._tying(homes):
                stages = zip(cells, meshes, strict=False)
                tie_weights(p.name, p.tied_weights, [*before, *cells], stages)
        first.check(p.name, cells)
        # One program for all devices has more cells than positions, which are all alike.
        for lowering, cell in zip(itertools.cycle(self.stage_lowerings), cells, strict=False):
            lowering.warn_of_idle(p.name, cell)
        self._weights_are_its_own = False

    def _create_cells(self, tpls: Sequence[Any], homes: Sequence[Home], pinned: bool) -> None:
        """Makes the stages, each on its home; `pinned` says whether variables are placed there."""
        for tpl, home, lowering in zip(tpls, homes, self.stage_lowerings, strict=False):
            replica = home.replica(0) if pinned else ("",) * home.group
            with (
                tf.device(replica[0]),
                lowering.on(replica, home),
                spread_weights(home) if py_utils.IsEagerMode() else contextlib.nullcontext(),
            ):
                try:
                    self.CreateChild(tpl.name, tpl)
                except LayoutError as error:
                    raise LayoutError(f"{self.params.name}: stage {tpl.name!r}: {error}") from error

    def _tying(self, homes: Sequence[Home]) -> contextlib.AbstractContextManager[Any]:
        """Enters the scope in which layers of the stack share weights."""
        return self.stage_lowerings[0].on(homes[0].replica(0))

    def _places(self) -> Sequence[int]:
        """Returns the position of each stage along the axis `layers`; at least one."""
        return range(max(len(self.params.cell_tpl), 1))

    def StageHomes(self) -> list[Home]:
        """Returns the devices of each stage on the current cluster."""
        homes = stage_homes(self.cluster, self._places(), self.params)
        if homes != self.homes:
            warn_of_places(self.cluster, self._places(), self.params)
        self.homes = homes
        return homes

    def _child_variable_scope_override(self) -> dict[str, list[Any]]:
        names = [*self._before_names, *self.stage_names]
        return {**super()._child_variable_scope_override(), **{name: [] for name in names}}

    def FProp(self, theta: Any, *args: Any) -> Any:
        """Runs the stack on the whole batch, and returns the results of the last stage."""
        check_theta(self.params.name, theta)
        with whole_batch_randomness(step_of_call(self)):
            args = self.FPropBefore(theta, *args)
            # There is a device even without a stage.
            homes = zip(self.StageHomes(), self.stage_lowerings, strict=True)
            for name, (home, lowering) in zip(self.stage_names, homes, strict=False):
                with tf.device(home.first), lowering.on(home.replica(0)):
                    args = exported(self.FPropCell(theta[name], name, *to_tuple(args)))
        return args

    def FPropStage(self, theta: Any, number: int, *args: Any, replica: int = 0) -> Any:
        """Runs a stage alone, on the devices of a replica; the first one gets the whole results."""
        name, lowering = self.stage_names[number], self.stage_lowerings[number]
        devices = self.StageHomes()[number].replica(replica)
        with (
            whole_batch_randomness(step_of_call(self)),
            tf.device(devices[0]),
            lowering.whole_rows().on(devices),
        ):
            return exported(self.FPropCell(theta[name], name, *to_tuple(args)))

    def FPropBefore(self, theta: Any, *args: Any) -> Any:
        """Runs the layers before the stages inside randomness."""
        if py_utils.IsEagerMode() and not self._weights_are_its_own:
            # A graph itself rejects a second variable of one name.
            check_weights_are_its_own(self, (SeqLayer, FeatureExtractionLayer))
            self._weights_are_its_own = True
        for name in self._before_names:
            args = exported(self.FPropCell(theta[name], name, *to_tuple(args)))
        return args

    def FPropCell(self, theta: Any, name: str, *args: Any) -> Any:
        """Runs one stage, or one layer before the stages, inside randomness."""
        cell = self.children[name]
        with layer_aliases({}, name_in_task(self)):
            if isinstance(cell, FeatureExtractionLayer) and name not in self._before_names:
                return cell.FProp(theta, *args)
            with (
                randomness.layer_scope(self._random_names[name]),
                noted(self.params.name, name, args),
            ):
                return cell.FProp(theta, *args)
