"""Definition of a task: a model, what devices store for it, and proxies that stand for devices.

A definition is what `--build FILE.py:NAME` names: a function of an engineer's own that returns a
`TaskDefinition`. The language models of this package are one more definition (`language_task`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tff_dpftrl import packages, validation
from tff_dpftrl.models import metric_grid
from tff_dpftrl.runtime.device import named_tensors
from tff_dpftrl.runtime.plans import example_pipeline
from tff_dpftrl.runtime.plans import expectations as expectations_lib
from tff_dpftrl.runtime.tasks import task_config
from tff_dpftrl.training import custom_models, warm_start

if TYPE_CHECKING:
    import tensorflow as tf

    from tff_dpftrl.data import vocabulary

_MODULE = "tff_dpftrl_task_definition"


@dataclasses.dataclass(frozen=True, eq=False)
class Language:
    """Words of a language model of this package, and the weights that it begins with."""

    words: vocabulary.Vocabulary
    rule: vocabulary.Rule  # Rule by which texts become words.
    initial_weights: warm_start.InitialWeights | None  # None for random ones.


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TaskDefinition:
    """Model and data of a task.

    Attributes:
      model: A `tf.keras.Model` with `loss` and `metrics`, all of whose weights are trained; a
        functional model (`learning.model.Model` or `tff.learning.models.FunctionalModel`); or a
        function without arguments that makes a `tff.learning.models.VariableModel`.
      pipeline: Features of an example that a device stores, and the preprocessing that makes the
        model's batches of them. It becomes part of the plan.
      proxies: For each simulated device its examples, as arrays, numbers or texts by feature name,
        from public or synthetic data.
      largest_metrics: Largest value of each metric in the report of one device, by name; devices
        cut their metrics to [0, largest]. A device reports sums, so the largest value of a mean
        over examples is that of the sum and of the number of examples.
      grids: Grids of the final metrics whose order statistics are recorded if the options ask for
        them, by name.
      data: Name of the devices' data in statements.
      description: Model in a few words, for people.
      loss: Loss of a Keras model: a `tf.keras.losses.Loss`; None for other models.
      metrics: Function without arguments that makes further metrics of a Keras model, an
        `OrderedDict` of `tf.keras.metrics.Metric`; the metric "loss" is always there.
      loss_metric: Name of the metric that must fall on the proxies; "" for none.
      algorithm: Function from the model and the arguments `model_aggregator` and
        `metrics_aggregator` to a `tff.learning.templates.LearningProcess`. It is refused unless
        `check_process` finds that all else than the model's metrics is released by
        `model_aggregator`. None for federated averaging with the optimizers of the options.
      trained_on: Public data that the model's weights were trained on, or "nothing" for random
        weights; None if unknown, which the privacy statement says.
      expectations: What else the task must show on the proxies, from `plans.expectations`. A task
        that evaluates the model of this one is not held to them.
      language: Words of a language model of this package; None for all other models.
      buckets: Buckets of the histograms that are estimated, by the histograms' names, for a task
        that counts and has no model (`analytics.define`); None for a model.
    """

    model: Any
    pipeline: example_pipeline.ExamplePipeline
    proxies: Sequence[Sequence[Mapping[str, Any]]]
    largest_metrics: Mapping[str, float]
    data: str
    description: str = "the engineer's own model"
    loss: Any = None
    metrics: Callable[[], Mapping[str, Any]] | None = None
    loss_metric: str = "loss"
    algorithm: Callable[..., Any] | None = None
    trained_on: str | None = None
    expectations: Sequence[expectations_lib.Expectation] = ()
    grids: Mapping[str, metric_grid.MetricGrid] = dataclasses.field(default_factory=dict)
    language: Language | None = None
    buckets: Mapping[str, Sequence[str]] | None = None

    def __post_init__(self):
        if not isinstance(self.pipeline, example_pipeline.ExamplePipeline):
            raise validation.UsageError(
                "pipeline must be a plans.example_pipeline.ExamplePipeline, got a "
                f"{type(self.pipeline).__name__}."
            )
        if isinstance(self.proxies, str | bytes) or not isinstance(self.proxies, Sequence):
            raise validation.UsageError(
                "proxies must be a list of devices, each a list of examples, got a "
                f"{type(self.proxies).__name__}."
            )
        for name in ("data", "description"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise validation.UsageError(f"{name} must be some words, got an empty one.")
        if not isinstance(self.expectations, Sequence):
            raise validation.UsageError(
                f"expectations must be a list, got a {type(self.expectations).__name__}."
            )
        for name, largest in self.largest_metrics.items():
            validation.positive(f"largest_metrics[{name!r}]", largest)

    def features(self) -> dict[str, named_tensors.Feature]:
        """Describes the examples that devices store."""
        return {name: _feature(name, one) for name, one in self.pipeline.features.items()}

    def initial_weights(self, num_untrained: int = 0) -> warm_start.InitialWeights | None:
        """Returns what is known of the weights to begin with; None for random ones."""
        if self.buckets is not None:
            return None  # Counts begin at zero.
        if self.language is not None:
            return self.language.initial_weights
        facts = custom_models.weights_facts(self.trained_on, ())
        untrained = f"; {num_untrained:,} weights are not trained at all" if num_untrained else ""
        return warm_start.InitialWeights(
            weights=(),
            source=facts["initial_weights_source"] + untrained,
            is_public=facts["initial_weights_are_public"],
            num_known_words=0,
        )

    def encoded_proxies(self) -> list[list[bytes]]:
        """Serializes the examples of the proxies, as devices store them."""
        features, encoded = self.features(), []
        for index, examples in enumerate(self.proxies):
            try:
                encoded.append(named_tensors.encode_all(examples, features))
            except validation.UsageError as error:
                raise validation.UsageError(f"proxies[{index}]: {error}") from None
        if not any(encoded):
            raise validation.UsageError("proxies must have at least one device with examples.")
        return encoded


def _feature(
    name: str,
    parsed: tf.io.FixedLenFeature | example_pipeline.PaddedSequence | example_pipeline.Values,
) -> named_tensors.Feature:
    """Describes what a device may store for a feature that a pipeline parses."""
    kinds = {"int64": "int", "float32": "float", "string": "text"}
    dtype = getattr(parsed.dtype, "name", str(parsed.dtype))
    if dtype not in kinds:
        raise validation.UsageError(
            f"pipeline.features[{name!r}] has the dtype {dtype}: examples store "
            f"{', '.join(kinds)}; cast in to_batch."
        )
    shape = getattr(parsed, "shape", None)
    return named_tensors.Feature(
        kind=kinds[dtype],
        shape=None if shape is None else tuple(int(size) for size in shape),
        is_optional=getattr(parsed, "default_value", None) is not None,
    )


def load(build: str) -> TaskDefinition:
    """Runs the function of a file that defines a task, as in "my_task.py:build".

    The file may import its neighbours.
    """
    if build == task_config.IN_MEMORY:
        raise validation.UsageError(
            "build was given in Python: give the argument definition there again."
        )
    file, _, name = build.rpartition(":")
    path = pathlib.Path(file)
    if not file or not name.isidentifier():
        raise validation.UsageError(
            f"build must be a file and a function of it, like my_task.py:build, got {build!r}."
        )
    if path.suffix != ".py" or not path.is_file():
        raise validation.UsageError(f"build names {file}, and there is no such file of Python.")
    try:
        with _neighbours_of(path):
            spec = importlib.util.spec_from_file_location(_MODULE, path)
            assert spec is not None and spec.loader is not None  # True for files that end in .py.
            module = importlib.util.module_from_spec(spec)
            sys.modules[_MODULE] = module  # Dataclasses look for their module.
            spec.loader.exec_module(module)
            function = getattr(module, name, None)
            made = function() if callable(function) else None
    except Exception as error:  # Anybody's code may raise anything.
        if getattr(error, "name", None) == "tensorflow_federated":
            packages.require(f"build {build!r}", "tensorflow_federated")
        raise validation.UsageError(
            f"build {build!r} raises {validation.one_line(error)}"
        ) from error
    if not callable(function):
        raise validation.UsageError(
            f"build names {name!r}, and {file} has no function of that name."
        )
    if not isinstance(made, TaskDefinition):
        raise validation.UsageError(
            f"build {build!r} must return a TaskDefinition, got a {type(made).__name__}."
        )
    return made


@contextlib.contextmanager
def _neighbours_of(path: pathlib.Path) -> Iterator[None]:
    """Lets a file import the files beside it."""
    folder = str(path.absolute().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
