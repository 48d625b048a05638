"""A population whose devices sum three small integers securely, and a device of a few lines."""

from __future__ import annotations

import numpy as np

from tests.runtime.server import example_service as example
from tff_dpftrl.runtime.actors import messages, population
from tff_dpftrl.runtime.protocol import session_stream, wire_pb2
from tff_dpftrl.runtime.server import served_task
from tff_dpftrl.secure_sums import device, parameters, secure_sum_pb2, vectors

MODULUS = 1000
NUM_STEPS = 4
HONEST, ACTIVE = parameters.ThreatModel.HONEST_BUT_CURIOUS, parameters.ThreatModel.ACTIVE_SERVER


def layout(size=3):
    return (vectors.Segment(1, 2**32), vectors.Segment(size, MODULUS))


class VectorSum(population.Summation):
    """Sums lists of integers, with their number before them."""

    def __init__(self, size=3):
        self._size = size

    def zero(self):
        return [0] * (1 + self._size)

    def accumulate(self, total, payload):
        raise AssertionError("No report is ever looked at.")

    def merge(self, total, other):
        count, other_count, *_ = total[0], other[0]
        summed = [(a + b) % MODULUS for a, b in zip(total[1:], other[1:], strict=True)]
        return [count + other_count, *summed]

    def decode_group(self, vector, num_devices):
        if int(vector[0][0]) != num_devices:
            raise population.UnusableReport("it counts other devices")
        return [num_devices, *vector[1].tolist()]


class Keep(population.ServerStep):
    """The model is the sum; the state counts the rounds."""

    def apply(self, total, num_reports, model, state):
        assert total[0] == num_reports
        return population.StepResult(
            model=b"model",
            state=str(int(state) + 1).encode(),
            metrics={"total": total[1:], "num_reports": num_reports},
        )

    def skip(self, model, state):
        return population.StepResult(
            model, str(int(state) + 1).encode(), {population.SKIPPED: True}
        )


def demanded(threat_model=HONEST, least_devices=3, size=3):
    return parameters.Parameters(layout(size), threat_model, least_devices, most_devices=100)


def task(
    goal_count=4, *, size=3, threat_model=HONEST, least_devices=3, step_timeout=5.0, **changes
):
    rounds = {
        "over_selection": 1.0,
        "least_fraction": 0.5,
        "selection_timeout": 30.0,
        "reporting_timeout": 30.0,
        "exchange_timeout": 5.0,
        "secure_step_timeout": step_timeout,
        **changes,
    }
    return population.Task(
        "sum",
        population.RoundSettings(goal_count=goal_count, **rounds),
        VectorSum(size),
        Keep(),
        secure_sum=demanded(threat_model, least_devices, size),
    )


def served(*args, size=3, **options):
    made = task(*args, size=size, **options)
    largest = vectors.packed_bytes(layout(size))
    return served_task.ServedTask(made, {example.NEWEST: b"secure plan"}.get, largest)


def vector(numbers, count=1):
    """The vector of a device."""
    return [np.array([count], np.uint32), np.array(numbers, np.uint16)]


class Trusting(device.Identity):
    """An identity whose proofs all devices accept."""

    def make_proof(self, identity_public_key):
        return b"genuine"

    def verify(self, identity_public_key, proof):
        return proof == b"genuine"


def participant(configuration, numbers, demands=None, count=1):
    """Makes a device's half of a sum, from a `Configure` or its message on the wire."""
    demands = demands or demanded(size=len(numbers))
    identity = Trusting() if demands.threat_model is ACTIVE else None
    model = (
        configuration.model
        if isinstance(configuration, messages.Configure)
        else configuration.broadcast
    )
    return device.Participant(
        demands,
        configuration.secure_sum_session,
        vector(numbers, count),
        identity=identity,
        context=session_stream.secure_sum_context(
            configuration.task, configuration.round_index, model
        ),
    )


class SecureDevice:
    """One device of a service, step by step."""

    def __init__(self, stream, configuration, numbers, demands=None):
        self.stream = stream
        self.configuration = configuration
        self._participant = participant(configuration, numbers, demands)
        self.message = self._participant.advertise()
        self.answer = None

    async def send(self):
        for message in session_stream.secure_sum_messages(self.message):
            await self.stream.call.write(message.SerializeToString())

    async def receive(self):
        """Reads the server's message; returns whether it was the last."""
        received = await self.stream.receive()
        if isinstance(received, wire_pb2.ReportAnswer):
            self.answer = received
            return True
        self.message = self._participant.answer(secure_sum_pb2.ToDevice.FromString(received))
        return False

    async def finish(self):
        """Takes all steps that are left; returns the answer to its report."""
        while True:
            await self.send()
            if await self.receive():
                return self.answer


async def configured(channel, numbers, demands=None, **check_in):
    stream = await example.connect(channel)
    await stream.check_in(**check_in)
    return SecureDevice(stream, await stream.receive(), numbers, demands)


async def take_part(channel, numbers=(1, 2, 3), demands=None):
    """A whole session; returns the answer to the report."""
    return await (await configured(channel, numbers, demands)).finish()
