"""The state that a task commits: the process's, and what was observed of participation.

A line of JSON stands before the tensors, so that what the operator asks for at every commit
is read without them. Needs no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json

from tff_dpftrl.runtime import participation_histograms

_MAGIC = b"tff_dpftrl task state 1\n"


class StateError(ValueError):
    """A state that is not this task's."""


@dataclasses.dataclass(frozen=True)
class TaskState:
    """What a task goes on from.

    Attributes:
      plan: SHA-256 of the server's plan, hexadecimal.
      observed: What the committed rounds have shown of participation.
      tensors: The state of the process, `tensor_values.to_bytes`; secret.
    """

    plan: str
    observed: participation_histograms.ObservedRounds
    tensors: bytes = dataclasses.field(repr=False)

    def to_bytes(self) -> bytes:
        """The state in one piece; equal states give equal bytes."""
        head = {"plan": self.plan, "observed": dataclasses.asdict(self.observed)}
        return _MAGIC + json.dumps(head, sort_keys=True).encode() + b"\n" + self.tensors

    @classmethod
    def from_bytes(cls, content: bytes, plan: str) -> TaskState:
        """Reads what `to_bytes` returned.

        Args:
          content: The state, as it was committed.
          plan: The plan that it must be of.

        Returns:
          The state.

        Raises:
          StateError: If it is of another plan, or cannot be read.
        """
        if not content.startswith(_MAGIC):
            raise StateError("The committed state is not that of a task with plans.")
        end = content.find(b"\n", len(_MAGIC))
        try:
            head = json.loads(content[len(_MAGIC) : end])
            observed = participation_histograms.ObservedRounds(**head["observed"])
            found = head["plan"]
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"The committed state cannot be read: {error!r}.") from None
        if found != plan:
            raise StateError(
                f"The committed state is of the plan {found[:16]}, and the task has the plan "
                f"{plan[:16]}: serve the task that the store was begun with, or give the new one "
                "another name."
            )
        return cls(found, observed, content[end + 1 :])
