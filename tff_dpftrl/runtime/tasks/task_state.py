"""The state that a task commits: that of its process, and the observed participation.

A line of JSON stands before the tensors. So the observed participation is read quickly, without
the tensors. Needs no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from tff_dpftrl import json_text, validation
from tff_dpftrl.runtime import participation_histograms
from tff_dpftrl.runtime.plans import plan_pb2, tensor_values
from tff_dpftrl.runtime.store import contents

_MAGIC = b"tff_dpftrl task state 1\n"


class StateError(validation.UsageError):
    """Raised for a state that is not this task's."""


@dataclasses.dataclass(frozen=True)
class TaskState:
    """The committed state of a task, from which its next round begins."""

    terms: str  # Digest of the task's terms (`Terms.digest()`), which are bound to its plans.
    observed: participation_histograms.ObservedRounds
    tensors: bytes | memoryview = dataclasses.field(repr=False)  # State of the process; secret.

    def to_bytes(self) -> bytes:
        """Serialises the state; equal states give equal bytes."""
        head = {"terms": self.terms, "observed": dataclasses.asdict(self.observed)}
        text = json.dumps(head, sort_keys=True).encode()
        return b"".join([_MAGIC, text, b"\n", self.tensors])

    @classmethod
    def from_bytes(cls, content: contents.Serialised, terms: str) -> TaskState:
        """Reads what `to_bytes` returned; refuses a state of other terms with a `StateError`."""
        seen, end = _head(content, terms)
        content = bytes(content) if isinstance(content, contents.Content) else content
        return cls(terms, seen, memoryview(content)[end + 1 :])


def tensors(
    content: contents.Serialised, terms: str, state: Sequence[plan_pb2.Tensor]
) -> list[np.ndarray]:
    """Reads the tensors of a committed state; refuses that of other terms or plans."""
    begin = _head(content, terms)[1] + 1
    return tensor_values.from_content(content, begin, state, "state")


def observed(content: contents.Serialised, terms: str) -> participation_histograms.ObservedRounds:
    """Reads the observed participation of a committed state, quickly, without its tensors."""
    return _head(content, terms)[0]


def _head(
    content: contents.Serialised, terms: str
) -> tuple[participation_histograms.ObservedRounds, int]:
    """Reads what stands before the tensors; returns it with the index of its end."""
    start = content.head() if isinstance(content, contents.Content) else content
    start = start if isinstance(start, bytes) else bytes(start)
    if not start.startswith(_MAGIC):
        raise StateError("The committed state is not that of a task with plans.")
    end = start.find(b"\n", len(_MAGIC))
    try:
        head = json_text.parse(start[len(_MAGIC) : end])
        seen = participation_histograms.ObservedRounds(**head["observed"])
        its_terms = str(head["terms"])
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"The committed state cannot be read: {error!r}.") from None
    if its_terms != terms:
        raise StateError(
            f"The store has a task of this name with other terms or plans ({its_terms[:16]!r}, not "
            f"{terms[:16]!r}): serve the task that it was begun with, or give the new one another "
            "name."
        )
    return seen, end
