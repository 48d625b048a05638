"""What a noise party costs a secure round: devices, server, and the party.

    PYTHONPATH=. python benchmarks/noise_parties.py [--devices 20 100 1000 3000] [--size 1350000]
        [--parties 1] [--repetitions 3]

Processor time in this process, without a network; the vectors are modulo 2^32. Up to 400 devices
are all neighbours of each other; larger groups have the graph that suffices for 10 % of corrupt
devices and of drop-outs. Nobody drops out: drop-outs cost the server as much with noise parties as
without. Groups with and without parties alternate. Some devices of each group are timed; the others
make keys and shares, no masks, and the server gets random vectors in the place of theirs. All
figures are the smallest of those measured, since other programs on a machine only add.

    device ms  all that a device computes, without noise parties and with them
    server s   relaying, addition and unmasking, without and with
    ratio      of all devices and the server, with noise parties over without
    party s    all that one noise party computes, with its noise already drawn
    peak MB    memory that the party's answer takes beside its noise
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl.secure_sums import device as device_lib
from tff_dpftrl.secure_sums import group as group_lib
from tff_dpftrl.secure_sums import (
    keys,
    neighbours,
    noise_party,
    parameters,
    secure_sum_pb2,
    vectors,
)

_LARGEST_COMPLETE = 400
_FRACTION = 0.1
_TIMED = 15
_MODULUS = 2**32


class _NoSum:
    """Sum of a device that is not timed."""

    def __init__(self, layout: vectors.Layout):
        self._layout = layout

    def add_masks(self, keys: list[bytes]) -> None:
        """Adds nothing."""

    subtract_masks = add_masks

    def value(self) -> vectors.Vector:
        """Returns a vector of one entry."""
        return [np.zeros(1, segment.dtype) for segment in self._layout]

    def wipe(self) -> None:
        """Overwrites nothing."""


class _Watch:
    """Processor seconds by name."""

    def __init__(self):
        self.seconds: dict[Any, float] = {}

    def __call__(self, name: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.process_time()
        result = function(*arguments)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin
        return result


def run(num_devices: int, size: int, num_parties: int) -> tuple[float, float, float]:
    """Makes one sum.

    Args:
      num_devices: Number of devices.
      size: Number of entries of a vector.
      num_parties: Number of noise parties.

    Returns:
      Processor seconds of a device, of the server and of a noise party.
    """
    k = None
    if num_devices > _LARGEST_COMPLETE:
        k = neighbours.choose(num_devices, _FRACTION, _FRACTION).num_neighbours
    signing = [ed25519.Ed25519PrivateKey.generate() for _ in range(num_parties)]
    demanded = parameters.Parameters(
        (vectors.Segment(size, _MODULUS),),
        parameters.ThreatModel.HONEST_BUT_CURIOUS,
        least_devices=num_devices // 2,
        least_neighbours=k,
        noise_parties=tuple(key.public_key().public_bytes_raw() for key in signing),
    )
    session, rng = parameters.new_session(), np.random.default_rng(0)
    vector = [rng.integers(0, _MODULUS, size, np.uint32)]
    content = vectors.pack(vector, demanded.layout)
    watch = _Watch()
    members: dict[Any, Any] = {}
    for i in range(num_devices):
        make = device_lib.Participant
        members[i] = watch(("device", i), make, demanded, session, vector)
        if i >= _TIMED:
            members[i]._sum = _NoSum(demanded.layout)  # type: ignore[assignment]
    for i, key in enumerate(signing):
        members["party", i] = noise_party.NoiseParty(demanded, session, key, lambda: vector)
    group = group_lib.Group(demanded, session, num_neighbours=k)

    def timed_as(name: Any) -> Any:
        return name if isinstance(name, tuple) else ("device", name)

    for name, member in members.items():
        watch("server", group.receive, name, watch(timed_as(name), member.advertise))
    while messages := watch("server", group.advance):
        phase = group.phase
        for name, message in messages.items():
            answer = watch(timed_as(name), members[name].answer, message)
            if phase is group_lib.Phase.MASKING and name >= _TIMED:
                answer = secure_sum_pb2.ToServer(masked_vector={"content": content})
            watch("server", group.receive, name, answer)
    seconds = watch.seconds
    of_parties = [seconds["party", i] for i in range(num_parties)]
    return (
        min(seconds["device", i] for i in range(min(_TIMED, num_devices))),
        seconds["server"],
        min(of_parties, default=0.0),
    )


def peak_bytes(num_devices: int, size: int) -> int:
    """Measures the memory that a party's answer takes beside its noise."""
    key = ed25519.Ed25519PrivateKey.generate()
    demanded = parameters.Parameters(
        (vectors.Segment(size, _MODULUS),),
        parameters.ThreatModel.HONEST_BUT_CURIOUS,
        least_devices=2,
        noise_parties=(key.public_key().public_bytes_raw(),),
    )
    noise = [np.zeros(size, np.uint32)]
    party = noise_party.NoiseParty(demanded, parameters.new_session(), key, lambda: noise)
    party.advertise()
    request = secure_sum_pb2.ToDevice()
    for i in range(num_devices):
        request.noise_request.devices.add(index=i, encryption_key=keys.KeyPair().public)
    tracemalloc.start()
    party.answer(request)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    """Prints a row for each number of devices."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs="+", type=int, default=[20, 100, 1000, 3000])
    parser.add_argument("--size", type=int, default=1_350_000)
    parser.add_argument("--parties", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    print("| devices | device, ms | with | server, s | with | ratio | party, s | peak, MB |")
    print("|---|---|---|---|---|---|---|---|")
    for n in given.devices:
        both = [
            [run(n, given.size, number) for number in (0, given.parties)]
            for _ in range(given.repetitions)
        ]
        (device, server, _), (with_device, with_server, party) = (
            map(min, zip(*rows, strict=True)) for rows in zip(*both, strict=True)
        )
        ratio = (n * with_device + with_server) / (n * device + server)
        print(
            f"| {n:,} | {1e3 * device:.1f} | {1e3 * with_device:.1f} | {server:.2f} | "
            f"{with_server:.2f} | {ratio:.3f} | {party:.2f} | {peak_bytes(n, given.size) / 1e6:.0f}"
            " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
