"""Custom models in a training run: what they may be, and what is recorded of them.

TensorFlow is imported only where there is such a model.
"""

from __future__ import annotations

import os
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from tff_dpftrl import validation
from tff_dpftrl.data import sources
from tff_dpftrl.models import table
from tff_dpftrl.runs import earlier_runs
from tff_dpftrl.training import language_config

if TYPE_CHECKING:
    import tensorflow as tf

    from tff_dpftrl.learning import model as model_lib
    from tff_dpftrl.models import custom_model, language_model

Model: TypeAlias = Union["tf.keras.Model", "model_lib.Model"]
"""A custom model, as the caller of `train` gives it: of Keras, or a functional one."""


def read(model: Model, *, vocabulary_size: int, sequence_length: int) -> custom_model.CustomModel:
    """Makes a language model of a custom model."""
    from tff_dpftrl.learning import functional_model
    from tff_dpftrl.learning import model as model_lib
    from tff_dpftrl.models import keras_model, keras_versions

    sizes = {"vocabulary_size": vocabulary_size, "sequence_length": sequence_length}
    if isinstance(model, keras_versions.Model):
        return keras_model.read(model, **sizes)
    if model_lib.is_functional(model):
        return functional_model.to_language_model(model, **sizes)
    raise validation.UsageError(
        "model must be a tf.keras.Model, a tff_dpftrl.learning.model.Model or a "
        f"tff.learning.models.FunctionalModel, got {type(model).__name__}: give the model itself, "
        "not a function that makes it."
    )


def name_of(named: str, model: Model | None, trained_on: str | os.PathLike[str] | None) -> str:
    """Returns the name of the model of a new run: `table.CUSTOM` for a custom one."""
    if model is None:
        if trained_on is not None:
            raise validation.UsageError("model_trained_on is about a custom model: give model too.")
        refuse_missing(named, None)
        return named
    if named not in (table.CUSTOM, language_config.LanguageConfig.model):
        raise validation.UsageError(
            f"config names the model {named!r}, but a custom model is given: leave one of them out."
        )
    if isinstance(trained_on, str) and not trained_on.strip():
        raise validation.UsageError(
            'model_trained_on must name a text, or be "nothing"; got an empty one.'
        )
    return table.CUSTOM


def refuse_missing(model: str, output: pathlib.Path | None) -> None:
    """Refuses a config of a custom model where no model is given."""
    if model != table.CUSTOM:
        return
    call = "tff_dpftrl.train(config, output, model=...)"
    if output is not None:
        call = resume_command(model, output, language_config.TextConfig.data)
    raise validation.UsageError(
        f"model {table.CUSTOM!r} is a custom model, which has to be given in Python: {call}."
    )


def resume_command(model: str, output: pathlib.Path, data: str) -> str:
    """Returns the command, or the call in Python, that resumes the run in a folder.

    What was in memory has to be given again.
    """
    given = ["model=..."] if model == table.CUSTOM else []
    if sources.is_in_memory(data):
        given.append("rows=...")  # Or text; whoever gave it knows.
    if given:
        return f"tff_dpftrl.train(None, {str(output)!r}, {', '.join(given)})"
    return f"tff-dpftrl train --resume --output {shlex.quote(str(output))}"


def check_resumed(
    named: str,
    model: Model | None,
    trained_on: str | os.PathLike[str] | None,
    output: pathlib.Path,
) -> None:
    """Refuses to resume a run without its custom model, or with one that it does not have."""
    if trained_on is not None:
        raise validation.UsageError(
            "model_trained_on is recorded when a run begins: leave it out to go on with it."
        )
    if model is None:
        refuse_missing(named, output)
    elif named != table.CUSTOM:
        raise validation.UsageError(
            f"model is given, but the run in {output} is of the model {named!r}: leave it "
            "out to go on with it."
        )


def check_same(recorded: Mapping[str, Any], model: language_model.LanguageModel) -> None:
    """Refuses a custom model that is not the one a run began with."""
    if recorded["model"] == table.CUSTOM:
        table.from_description(recorded).check_same(model)


def for_file(
    stored: language_model.LanguageModel, model: Model | None, path: pathlib.Path
) -> language_model.LanguageModel:
    """Returns the model that can use the weights of a file, which describes `stored`."""
    from tff_dpftrl.models import custom_model

    if not isinstance(stored, custom_model.Fingerprint):
        if model is not None:
            raise validation.UsageError(
                f"model is given, but {path} is of a model of this package, which needs none: "
                "leave it out."
            )
        return stored
    if model is None:
        raise validation.UsageError(
            f"{path} has the weights of a custom model, which only the Python code of its author "
            "can compute. There, tff_dpftrl.training.trained_model.find("
            f"{str(path.parent)!r}).load(model=...) gives a model to predict with, and "
            "tff_dpftrl.training.saved_model.write exports it; see docs/how_to/custom_models.md."
        )
    read_model = read(
        model, vocabulary_size=stored.vocabulary_size, sequence_length=stored.sequence_length
    )
    stored.check_same(read_model)
    return read_model


def weights_facts(
    trained_on: str | os.PathLike[str] | None, users: Sequence[str]
) -> dict[str, Any]:
    """Returns what a run records of the initial weights of a custom model, as for a warm start.

    They were trained on public text, or come from the run in a folder, which is then a path.
    """
    if isinstance(trained_on, os.PathLike):
        return earlier_runs.of_caller(pathlib.Path(trained_on), users)
    source = "not recorded; they are those of the caller's own model"
    if trained_on is not None:
        source = f"{trained_on} (so the operator says; it is the caller's own model)"
    return {"initial_weights_source": source, "initial_weights_are_public": trained_on is not None}
