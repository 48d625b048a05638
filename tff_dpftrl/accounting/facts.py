"""Facts of a run that its privacy statement reports besides mechanism and ε."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl.accounting import composition

Scalar = str | int | float | bool | None


# Of an absolute path at the beginning of a word.
_FOLDERS = re.compile(r"""(?<![^\s"'(])(?:~|[A-Za-z]:)?[/\\](?:[^\s,;/\\]+[/\\])*(?=[^\s,;/\\])""")


def _cut(text: Scalar) -> Scalar:
    """Cuts absolute paths in a text to their last part."""
    return _FOLDERS.sub("", text) if isinstance(text, str) else text


@dataclasses.dataclass(frozen=True)
class Trust:
    """Trust model of a run: who one is protected from, and what the server sees.

    `setting` is the model in full, `from_whom` the same in plain sentences.
    """

    setting: str
    from_whom: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything about a run that a privacy statement reports and ε does not depend on.

    A statement may be published: absolute paths in texts are cut to their last part.

    Attributes:
      parameters: Parameters of the run that the claim does not have, by name.
      vocabulary_source: Text that the vocabulary was counted on; None if unknown, or without one.
      vocabulary_is_public: Whether the operator declares this text to be public. The statement
        lists the vocabulary among the assumptions then, and otherwise as not covered. Where it is
        None and there is no source, either, the statement speaks of no vocabulary.
      hyperparameter_tuning: Data that the hyperparameters were chosen on; None if unknown.
      not_covered: Further data accesses that the guarantee does not cover, a sentence each.
      caveats: Further caveats, a sentence each.
      headline_caveats: Caveats that stand right under the headline, a sentence each.
      earlier_runs: Runs that the initial weights come from: the last one first.
      same_users: Whether these trained on the same users as this run; None if that is not known.
      trust: Trust model of a run with other means than the usual ones, such as secure sums; None
        for the usual one.
      rows_have_owners: Whether a row may be of several users, who are each protected.
    """

    parameters: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    vocabulary_source: str | None = None
    vocabulary_is_public: bool | None = None
    hyperparameter_tuning: str | None = None
    not_covered: Sequence[str] = ()
    caveats: Sequence[str] = ()
    headline_caveats: Sequence[str] = ()
    earlier_runs: Sequence[composition.Spent] = ()
    same_users: bool | None = None
    trust: Trust | None = None
    rows_have_owners: bool = False

    def __post_init__(self) -> None:
        values: dict[str, Any] = {
            name: _cut(getattr(self, name))
            for name in ("vocabulary_source", "hyperparameter_tuning")
        }
        for name in ("not_covered", "caveats", "headline_caveats"):
            values[name] = tuple(map(_cut, getattr(self, name)))
        values["parameters"] = {name: _cut(value) for name, value in self.parameters.items()}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def has_vocabulary(self) -> bool:
        """Whether the model is known to have a vocabulary."""
        return self.vocabulary_is_public is not None or self.vocabulary_source is not None

    def with_plan(
        self, parameters: Mapping[str, Scalar], *, headline_caveats: Sequence[str] = ()
    ) -> Facts:
        """Returns the facts together with those of the run's privacy plan.

        Args:
          parameters: Parameters of the plan; they come before those of the run.
          headline_caveats: Headline caveats of the plan; they come first.

        Returns:
          All facts.
        """
        return dataclasses.replace(
            self,
            parameters={**parameters, **self.parameters},
            headline_caveats=(*headline_caveats, *self.headline_caveats),
        )
