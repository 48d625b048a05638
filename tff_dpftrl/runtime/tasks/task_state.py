"""The state that a task commits: the process's, and what was observed of participation.

A line of JSON stands before the tensors, so that what the operator asks for at every commit
is read without them. Needs no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json

from tff_dpftrl import json_text, validation
from tff_dpftrl.runtime import participation_histograms

_MAGIC = b"tff_dpftrl task state 1\n"


class StateError(validation.UsageError):
    """A state that is not this task's."""


@dataclasses.dataclass(frozen=True)
class TaskState:
    """What a task goes on from.

    Attributes:
      terms: `Terms.digest()` of the task's terms, which are bound to its plans.
      observed: What the committed rounds have shown of participation.
      tensors: The state of the process, `tensor_values.to_bytes`; secret.
    """

    terms: str
    observed: participation_histograms.ObservedRounds
    tensors: bytes = dataclasses.field(repr=False)

    def to_bytes(self) -> bytes:
        """The state in one piece; equal states give equal bytes."""
        head = {"terms": self.terms, "observed": dataclasses.asdict(self.observed)}
        return _MAGIC + json.dumps(head, sort_keys=True).encode() + b"\n" + self.tensors

    @classmethod
    def from_bytes(cls, content: bytes, terms: str) -> TaskState:
        """Reads what `to_bytes` returned.

        Args:
          content: The state, as it was committed.
          terms: The terms that it must be of.

        Returns:
          The state.

        Raises:
          StateError: If it is of another task, or cannot be read.
        """
        seen, end = _head(content, terms)
        return cls(terms, seen, content[end + 1 :])


def observed(content: bytes, terms: str) -> participation_histograms.ObservedRounds:
    """What a committed state says of participation, without its tensors: quick.

    Arguments and errors as for `TaskState.from_bytes`.
    """
    return _head(content, terms)[0]


def _head(content: bytes, terms: str) -> tuple[participation_histograms.ObservedRounds, int]:
    """What stands before the tensors, and where it ends."""
    if not content.startswith(_MAGIC):
        raise StateError("The committed state is not that of a task with plans.")
    end = content.find(b"\n", len(_MAGIC))
    try:
        head = json_text.parse(content[len(_MAGIC) : end])
        seen = participation_histograms.ObservedRounds(**head["observed"])
        found = str(head["terms"])
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"The committed state cannot be read: {error!r}.") from None
    if found != terms:
        raise StateError(
            f"The store has a task of this name with other terms or plans ({found[:16]!r}, not "
            f"{terms[:16]!r}): serve the task that it was begun with, or give the new one another "
            "name."
        )
    return seen, end
