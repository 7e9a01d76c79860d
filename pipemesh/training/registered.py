"""Registered lingvo models as subjects of a run."""

from __future__ import annotations

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import base_model, base_model_params, gpipe

from pipemesh.data import DocumentBatches
from pipemesh.errors import PipelineError, PlanError, TrainingError
from pipemesh.example_models import example, import_model_module
from pipemesh.layers import PipeliningLayer, mesh_cluster
from pipemesh.layers.pipeline.stack_plan import PARAMS, num_places, set_plan, values_of
from pipemesh.mesh import Mesh
from pipemesh.plan import Plan
from pipemesh.text import is_missing, nearest, nearest_text
from pipemesh.training.inputs import heldout_batches, training_dataset
from pipemesh.training.learning import Learning, set_attributes
from pipemesh.training.lingvo_params import only_learner, params_within, set_filters
from pipemesh.training.subject import Subject

# The attribute of a class that receives the plan before its `Task` is called.
_PLAN = "PLAN"
# The attribute of a class that names the module for decoding, if there is one.
_DECODED_BY = "DECODED_BY"
# Attributes of a class with adapters: the rank, and the others.
ADAPTER_SETTINGS = ("LORA_RANK", "LORA_ALPHA", "LORA_DROPOUT", "LORA_TARGETS")
# Default datasets for evaluation; the first that a model has is used.
_HELD_OUT = ("Dev", "Test")
# lingvo's default number of steps.
_MAX_STEPS = base_model.BaseTask.Params().train.max_steps


class RegisteredModel(Subject):
    """A `SingleTaskModelParams` of lingvo, pipelined or not.

    A class attribute `PLAN` (a `pipemesh.plan.Plan`) is set to the plan before `Task()` is called.
    For other classes the plan is applied to the stacks that `Task()` declares, and their number of
    stages stays.

    Args:
        config: an instance of the class.
        name: name of the model.
        values: values that replace those of the plan, as in `Plan.to_values`.
        device_type: `CPU` or `GPU`.
        seed: seed of weights and random ops, if the task has no `random_seed`.
        plain: whether stacks run without a pipeline.
        strict_devices: whether an operation outside its stage's device is an error.
        compile: whether XLA compiles what stages compute.
        freeze: regular expression of names of weights that are not trained.
        train_only: regular expression of names of the only weights that are trained.
        dataset: dataset for evaluation, or `none`. Default: `Dev` if there is one, else `Test`,
            else none.

    Raises:
        PipemeshError: the model does not support the plan.
        TrainingError: the model has no such dataset.

    Example:
        >>> from models.one_billion_word.params import OneBillionWordTiny
        >>> model = RegisteredModel(OneBillionWordTiny(), "Tiny", {"num_microbatches": "4"})
        >>> str(model.plan)
        'mesh=layers:2 num_microbatches=4'
    """

    read_ahead = 16

    def __init__(
        self,
        config: Any,
        name: str,
        values: Mapping[str, str] | None = None,
        *,
        device_type: str = "CPU",
        seed: int = 0,
        plain: bool = False,
        strict_devices: bool = False,
        compile: bool = False,
        freeze: str | None = None,
        train_only: str | None = None,
        dataset: str | None = None,
    ) -> None:
        self.name, self.device_type, self.seed = name, device_type, seed
        if type(config).Model is not base_model_params.SingleTaskModelParams.Model:
            raise TrainingError(
                f"{name}: its Model() is not called, only Task(); set there what Model() sets, and "
                "leave it out"
            )
        self._config, values = config, dict(values or {})
        self.saves_frozen = not getattr(config, ADAPTER_SETTINGS[0], 0)
        if plain:
            values.setdefault("mesh", "layers:1")
        # Flags that checkpoints store.
        self.given: Mapping[str, Any] = {}
        self.learning = Learning()
        self._heldout = _heldout_of(config, name, dataset)
        for key in ("Train", self._heldout):
            if hasattr(config, f"Task_{key}"):
                raise TrainingError(
                    f"{name}: its Task_{key}() is not called, only Task(); leave it out"
                )
        filters = {"FREEZE": freeze, "TRAIN_ONLY": train_only}
        # Some classes have them, and give them to their learner.
        for key in [key for key in filters if hasattr(config, key)]:
            if (pattern := filters.pop(key)) is not None:
                setattr(config, key, pattern)
        plan = getattr(config, _PLAN, None)
        if isinstance(plan, Plan):
            self.plan = Plan.from_values(_of_plan(plan.to_values(), plain) | values)
            setattr(config, _PLAN, self.plan)
            self._task = config.Task()
        else:
            self._task = config.Task()
            self.plan = _plan_of(self._task, name, values, plain)
        for stack in stacks_of(self._task):
            stack.pipelined = stack.pipelined and not plain
            stack.strict_devices = stack.strict_devices or strict_devices
            stack.compile = (stack.compile or compile) and not plain
        set_filters(self._task, filters.get("FREEZE"), filters.get("TRAIN_ONLY"))
        # lingvo's default is not a limit that a user has set.
        if (most := self._task.train.max_steps) != _MAX_STEPS:
            self.most_steps = most
        if self._task.random_seed is None:
            self._task.random_seed = seed
        self._settings: dict[str, Any] = {
            "device_type": device_type,
            "seed": seed,
            **_lines("task", self._task),
            **_lines("input", self._input("Train")),
        }

    def learn(self, given: Mapping[str, Any]) -> None:
        """Changes values of `Learning`; those of the model's class that belong to them stay. Raises
        TrainingError for values that do not fit together, or that the model's optimizer does not
        have.
        """
        if not given:
            return
        set_attributes(self._config, given)
        learning = self.learning = Learning.of(self._config, given)
        rates = only_learner(self._task, "flags of learning change")
        if rates is None:
            raise TrainingError(f"{self.name}: p.train has no learner; give it one")
        # A new optimizer would lose what Task() has set of it.
        own = learning if "optimizer" in given else dataclasses.replace(learning, optimizer=None)
        own.change(rates)
        if learning.learning_rate is not None:
            self.rate_name = "--learning_rate"
        self._settings |= _lines("task", self._task)

    def check_batch(self) -> None:
        """Checks that the input's batch divides into the plan's microbatches, if it has a size."""
        size = getattr(self._input("Train"), "batch_size", None)
        if isinstance(size, int) and size > 0:
            self.plan.check_batch(size)

    def has_actions(self) -> bool:
        """Returns whether it has a pipeline whose actions are separate operations."""
        stacks = stacks_of(self._task)
        return bool(stacks) and stacks[0].pipelined and self.plan.lowering == "placement"

    def task(self) -> Any:
        """Returns the params of the lingvo task."""
        return self._task.Copy()

    def task_with_input(self, is_trained: bool) -> Any:
        """Returns the task's params with the dataset for training or for evaluation, as lingvo
        does.
        """
        task, dataset = self.task(), "Train" if is_trained else self._heldout
        if dataset is None or task.input is not None:
            return task
        return task.Set(input=self._input(dataset))

    def train_data(self, epoch: int) -> tf.data.Dataset:
        """Returns the batches of `Train()`, repeated without end."""
        with self._cluster():
            dataset, self.filters = training_dataset(self._input("Train"))
            return dataset

    def heldout_data(self) -> Iterable[Any] | None:
        """Returns the batches of the dataset for evaluation."""
        if self._heldout is None:
            return None
        with self._cluster(do_eval=True):
            return heldout_batches(self._input(self._heldout))

    def data_counts(self, heldout: bool = False) -> Sequence[Any]:
        """Returns the numbers of the training data, or of the held-out data, if its dataset counts
        them.
        """
        key = self._heldout if heldout else "Train"
        counts = getattr(self._dataset(key), "counts", None)
        return counts() if counts else ()

    def batch_specs(self) -> Sequence[Any]:
        """Returns those of documents in buckets of length; often none."""
        dataset = self._dataset("Train")
        has_buckets = isinstance(dataset, DocumentBatches) and dataset.buckets
        return dataset.batch_specs() if has_buckets else ()

    def _dataset(self, key: str | None) -> Any:
        return getattr(self._input(key), "dataset", None) if key else None

    def note(self) -> dict[str, Any]:
        """Returns all params, the plan, the name of the model, and what tells other data."""
        decoded_by = getattr(self._config, _DECODED_BY, None)
        digests = getattr(self._dataset("Train"), "digests", {})
        return {
            "model": self.name,
            "plan": self.plan.to_values(),
            "flags": dict(self.given),
            "settings": self._settings | {f"input.{name}": v for name, v in digests.items()},
            **({"decoded_by": decoded_by} if decoded_by else {}),
            **({} if self.saves_frozen else {"adapters": self._adapters()}),
        }

    def _adapters(self) -> dict[str, Any]:
        return {name: getattr(self._config, name) for name in ADAPTER_SETTINGS}

    def _input(self, dataset: str) -> Any:
        return self._config.GetDatasetParams(dataset)

    def _cluster(self, do_eval: bool = False) -> Any:
        plan = self.plan
        return mesh_cluster(plan.mesh, self.device_type, do_eval, plan.layout, plan.lowering)


def find_model(name: str) -> Any:
    """Returns the class of a model.

    Args:
        name: `package.module.Class`.

    Raises:
        TrainingError: there is no such class, or it is not a `SingleTaskModelParams`.
    """
    module_name, _, class_name = name.rpartition(".")
    hint = f"write package.module.Class, as in {example('digits.params.DigitsPipelined')}"
    if not module_name:
        raise TrainingError(f"--model={name!r} names no module; {hint}")
    try:
        module = import_model_module(module_name)
    except ModuleNotFoundError as error:
        if not is_missing(module_name, error):
            raise TrainingError(
                f"--model={name!r}: {module_name} imports {error.name!r}, which is not installed"
            ) from error
        raise TrainingError(
            f"--model={name!r}: there is no module {error.name!r}; {hint}, from the folder in "
            "which the package lies"
        ) from error
    model = getattr(module, class_name, None)
    base = base_model_params.SingleTaskModelParams
    if inspect.isclass(model) and issubclass(model, base):
        return model
    models = {k: v for k, v in vars(module).items() if inspect.isclass(v) and issubclass(v, base)}
    # Most classes that others derive from are no models.
    bases = {parent for known in models.values() for parent in known.__mro__[1:]}
    near = nearest(class_name, models)
    known = [k for k, v in models.items() if k == near or v not in {base, *bases}]
    problem = f"has no {class_name!r}{nearest_text(class_name, known) or ', nor any other model'}"
    if model is not None:
        problem = f"has {class_name!r}, which is no class of lingvo's SingleTaskModelParams"
    if inspect.isclass(model) and issubclass(model, base_model_params.MultiTaskModelParams):
        problem = (
            f"has {class_name!r} of several tasks, but one is trained; give a class of lingvo's "
            "SingleTaskModelParams for each task, and train one after the other"
        )
    raise TrainingError(f"--model={name!r}: {module_name} {problem}")


def mesh_before(config: Any, values: Mapping[str, str]) -> Mesh | None:
    """Returns the mesh of a model's plan before `Task`, which may start TensorFlow, is called; None
    if only `Task` defines it.
    """
    if "mesh" in values:
        return Mesh.from_text(values["mesh"])
    plan = getattr(config, _PLAN, None)
    return plan.mesh if isinstance(plan, Plan) else None


def batch_sizes(config: Any) -> tuple[int | None, int | None]:
    """Returns the rows of a model's training batches and the tokens of a row; None if unknown."""
    batches = getattr(config.GetDatasetParams("Train"), "dataset", None)
    if isinstance(batches, DocumentBatches):
        return batches.batch_size, batches.row_tokens()
    return getattr(config, "BATCH_SIZE", None), getattr(config, "SEQUENCE_LENGTH", None)


def stacks_of(params: Any) -> list[Any]:
    """Returns the params of the outermost pipelined stacks within a layer's params."""
    return params_within(params, PipeliningLayer)


def _of_plan(values: Mapping[str, str], plain: bool) -> dict[str, str]:
    """Returns the values of a plan that count: without a pipeline only its precision."""
    return {name: text for name, text in values.items() if name == "compute_dtype" or not plain}


def _plan_of(task: Any, name: str, values: dict[str, str], plain: bool) -> Plan:
    """Returns the plan of a task that declares its stages itself, and applies it to its stacks."""
    stacks = stacks_of(task)
    if not stacks:
        lingvos = params_within(task, gpipe.PipeliningLayer) and (
            "the PipeliningLayer of lingvo.core.gpipe; call pipemesh.layers.replace_gpipe() before "
            "its module imports lingvo"
        )
        of_pipelines = [n for n in (*PARAMS, "boundaries") if n in values]
        if of_pipelines:
            raise PlanError(
                f"{of_pipelines[0]}={values[of_pipelines[0]]}: {name} has "
                f"{lingvos or 'no PipeliningLayer, for which it is; leave it out'}"
            )
        plan = Plan.from_values(values)
        if plan.mesh.num_devices > 1:
            otherwise = (
                "no PipeliningLayer, so it computes on one device; put its layers into one, or "
                "leave the mesh out"
            )
            raise PlanError(f"mesh={plan.mesh}: {name} has {lingvos or otherwise}")
        return plan
    if "boundaries" in values:
        raise PlanError(
            f"boundaries={values['boundaries']}: {name} cuts its layers itself; give the class an "
            "attribute PLAN = pipemesh.plan.Plan() and let Task() cut them as self.PLAN says"
        )
    first = stacks[0]
    for stack in stacks[1:]:
        if (stack.mesh_shape, stack.layout) != (first.mesh_shape, first.layout):
            raise PlanError(
                f"mesh={values.get('mesh', first.mesh_shape)}: {name} has stacks with meshes or "
                "layouts of their own, but there is one cluster; leave mesh_shape and layout of "
                "its stacks out"
            )
    own = _of_plan(values_of(first), plain) | values
    if "mesh" not in own:
        own["mesh"] = str(first.mesh_shape or f"layers:{_places(first, values, name)}")
    plan = Plan.from_values(own)
    needed = max(_places(stack, values, name) for stack in stacks)
    if plan.mesh.num_stages > needed and not plan.allow_idle:
        raise PlanError(
            f"mesh={plan.mesh}: the stages of {name} need {needed} along the axis 'layers', so "
            f"other devices would idle; use layers:{needed}, or set allow_idle"
        )
    for stack in stacks:
        set_plan(stack, plan, values)
        # The cluster carries both.
        stack.Set(mesh_shape=None, layout=None)
    return plan


def _places(stack: Any, values: Mapping[str, str], name: str) -> int:
    """Returns the number of indices along `layers` that the schedule needs for a stack."""
    try:
        return num_places(stack, values.get("schedule", stack.schedule))
    except PipelineError as error:
        raise PlanError(f"{stack.name} of {name}: {error}") from error


def _heldout_of(config: Any, name: str, dataset: str | None) -> str | None:
    """Returns the name of the dataset for evaluation."""
    base = base_model_params.SingleTaskModelParams
    listed = config.GetAllDatasetParams()
    if listed is None:
        datasets = [
            key
            for key, _ in inspect.getmembers(type(config), callable)
            if key[0].isupper() and not hasattr(base, key)
        ]
        defined = [
            k for k in ("Train", *_HELD_OUT) if getattr(type(config), k) is not getattr(base, k)
        ]
        datasets = [*defined, *datasets]
    else:
        datasets = list(listed)
    if "Train" not in datasets:
        raise TrainingError(f"{name} has no dataset Train; define the method Train of its class")
    if dataset == "none":
        return None
    if dataset is None:
        return next((key for key in _HELD_OUT if key in datasets), None)
    if dataset not in datasets:
        raise TrainingError(
            f"--dataset={dataset!r}: {name} has no such dataset{nearest_text(dataset, datasets)}"
        )
    return dataset


def _lines(prefix: str, params: Any) -> dict[str, str]:
    """Returns params as text, by name."""
    lines: dict[str, str] = {}
    for line in params.ToText().splitlines():
        key, separator, value = line.partition(" : ")
        if separator:
            lines[f"{prefix}.{key}"] = value

    def note(key: str, value: Any) -> None:
        # lingvo would write only the name of its type.
        if isinstance(value, functools.partial):
            arguments = [*map(repr, value.args), *(f"{k}={v!r}" for k, v in value.keywords.items())]
            name = getattr(value.func, "__qualname__", type(value.func).__name__)
            lines[f"{prefix}.{key}"] = f"{name}({', '.join(arguments)})"
        elif is_function(value):
            lines[f"{prefix}.{key}"] = repr(value)

    def is_function(value: Any) -> bool:
        return dataclasses.is_dataclass(value) and callable(value)

    params.Visit(note, lambda _, value: not is_function(value))
    return lines
