"""A task whose sums are lists of devices, so that every result tells what is in it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
from typing_extensions import override

from tff_dpftrl.runtime.actors import messages, population
from tff_dpftrl.runtime.protocol import session_stream
from tff_dpftrl.secure_sums import device as participant_lib
from tff_dpftrl.secure_sums import parameters, vectors

NOISE_ROWS = "rows "
"""Beginning of the entry of a sum that names the rows of its noise parties' noise."""


def rows_in(total: list[str]) -> str:
    """Returns the entry of a sum that names the rows of its noise; empty if there is none."""
    return next((name for name in total if name.startswith(NOISE_ROWS)), "")


@dataclasses.dataclass(frozen=True)
class Noised:
    """Content of a noised result.

    Attributes:
      task: The task.
      round_index: The round, from 0.
      noise: Which noise it was: another one in each call of the step.
      devices: Whose reports are in the sum, sorted; each as often as it is in it.
    """

    task: str
    round_index: int
    noise: str
    devices: tuple[str, ...]

    def text(self) -> str:
        """Returns a text that `parse` reads."""
        return f"{self.task}|{self.round_index}|{self.noise}|{','.join(self.devices)}"

    @classmethod
    def parse(cls, text: str) -> Noised:
        """Reads the text of a result."""
        task, round_index, noise, devices = text.split("|")
        return cls(task, int(round_index), noise, tuple(devices.split(",")))


class NameSum(population.Summation):
    """Sums lists of names."""

    @override
    def zero(self) -> list[str]:
        return []

    @override
    def accumulate(self, total: list[str], payload: Any) -> list[str]:
        if not isinstance(payload, str):
            raise population.UnusableReport("the report is not a name")
        total.append(payload)
        return total

    @override
    def merge(self, total: list[str], other: list[str]) -> list[str]:
        return total + other


def secure_sum(num_devices: int, noise_parties: tuple[bytes, ...] = ()) -> parameters.Parameters:
    """Returns how names are summed securely: each device's place has its connection's number.

    Args:
      num_devices: How many devices there are.
      noise_parties: Raw public keys of the noise parties. Each has a place for the row of its
        noise, counted from 1.

    Returns:
      The parameters, for groups of two devices and more.
    """
    layout = [vectors.Segment(1, 2**32), vectors.Segment(num_devices, 2**32)]
    if noise_parties:
        layout.append(vectors.Segment(len(noise_parties), 2**32))
    return parameters.Parameters(
        tuple(layout),
        parameters.ThreatModel.HONEST_BUT_CURIOUS,
        least_devices=2,
        most_devices=num_devices,
        noise_parties=noise_parties,
    )


def participant(
    demanded: parameters.Parameters, told: messages.Configure
) -> participant_lib.Participant:
    """Makes a device's half of the sum of a group.

    Args:
      demanded: What `secure_sum` returned.
      told: What the device was sent; it is named after its connection, like "3.17".

    Returns:
      The participant.
    """
    vector = vectors.zeros(demanded.layout)
    device, _, connection = told.device.partition(".")
    vector[0][0] = 1
    vector[1][int(device)] = int(connection)
    context = session_stream.secure_sum_context(told.task, told.round_index, told.model)
    return participant_lib.Participant(demanded, told.secure_sum_session, vector, context=context)


class SecureNameSum(NameSum):
    """Sums lists of names, which groups of devices have summed securely."""

    @override
    def decode_group(self, vector: vectors.Vector, num_devices: int) -> list[str]:
        count, connections, *noise = vector
        devices = np.flatnonzero(connections)
        if int(count[0]) != num_devices or len(devices) != num_devices:
            return ["a sum of other devices"]  # No law allows it.
        names = [f"{device}.{connections[device]}" for device in devices]
        if noise:
            names.append(f"{NOISE_ROWS}{'+'.join(str(int(row) - 1) for row in noise[0])}")
        return names


class NameStep(population.ServerStep):
    """Adds noise to a list of names: the name of the noise, which no other call has.

    The state is the task, the seed and the round, like "task|seed|0".
    """

    def __init__(self, *, has_model: bool = True):
        """Says what it makes.

        Args:
          has_model: Whether the result is a model too, or metrics only.
        """
        self._has_model = has_model
        self._calls = itertools.count()

    @override
    def apply(
        self, total: list[str], num_reports: int, model: bytes, state: bytes
    ) -> population.StepResult:
        del model, num_reports
        task, seed, round_index = state.decode().split("|")
        noise = f"{seed}:{round_index}:{next(self._calls)}"
        if rows := rows_in(total):  # The noise is in the sum already.
            noise, total = rows, [name for name in total if name != rows]
        result = Noised(task, int(round_index), noise, tuple(sorted(total)))
        text = result.text()
        return population.StepResult(
            model=text.encode() if self._has_model else b"",
            state=f"{task}|{seed}|{int(round_index) + 1}".encode(),
            metrics={"noised": text},
        )

    @override
    def skip(self, model: bytes, state: bytes) -> population.StepResult:
        task, seed, round_index = state.decode().split("|")
        state = f"{task}|{seed}|{int(round_index) + 1}".encode()
        return population.StepResult(model, state, {population.SKIPPED: True})


def initial_state(task: str, seed: str) -> bytes:
    """Returns the state that a task begins with."""
    return f"{task}|{seed}|0".encode()
