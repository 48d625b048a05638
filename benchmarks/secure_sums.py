"""What secure sums cost a device and the server, and how often a graph of neighbours fails.

    PYTHONPATH=. python benchmarks/secure_sums.py costs [--quick]
        [--devices 50 100 200 400 1000 4000] [--sizes 100000 1350000] [--drop-outs 0 10 30]
    PYTHONPATH=. python benchmarks/secure_sums.py failures [--quick]
    PYTHONPATH=. python benchmarks/secure_sums.py peers --flower PYTHON
        [--cases 50x100000 100x100000] [--drop-outs 10]

All times are processor time. Devices and server run in this process and exchange the messages
of the protocol; there is no network. The server is honest but curious. Up to 400 devices are all
neighbours of each other; larger groups have the graph of neighbours that suffices for 10 % of
corrupt devices and for the drop-outs of the case, but at least 10 % of them (2^-40 and 2^-20,
see `failures`). Who drops out has sent its shares, and no masked vector: the dearest moment.

costs: a row for each number of devices n, size d of the vector, modulus and percentage of
drop-outs. A few devices of each group have vectors of that size and are timed; the others have
vectors of one entry and send the server a random one. In groups that are small enough all
devices are alike, and the sum is compared with the plain one ("=").

    device ms  all that a device computes: keys, shares, masks, revealed shares (median)
    server ms  without unmasking: relaying of keys and shares, addition of vectors
    unmask ms  recovery of secrets and removal of masks; "~": of a small vector, to which as
               many masks as are removed are added, at the time that one of this size takes
    up, down   bytes of a device over those of the plain vector
    ratios     device, and its step of masking alone, over the bare AES-256-CTR stream of its
               masks; unmasking over the stream of the masks that it must remove; and the least
               that both could be: the stream and the X25519 exchanges, over the stream

Bare streams are measured right after what they are compared with.

failures: parameters by `neighbours.choose`, with bounds on the logarithms of the probabilities;
then, for graphs that fail often enough to be simulated, bounds beside frequencies.

peers: Flower's SecAgg+ for the same n, d, drop-outs, neighbours and threshold; see
benchmarks/peers/README.md for its environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric import x25519
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tff_dpftrl.discretization import grid
from tff_dpftrl.secure_sums import device as device_lib
from tff_dpftrl.secure_sums import group as group_lib
from tff_dpftrl.secure_sums import masks, neighbours, parameters, secure_sum_pb2, vectors

_LARGEST_COMPLETE = 400
_CORRUPT_FRACTION = 0.1
_BITS = 20  # Of the modulus that the encoding chooses.
_SAMPLED = 5  # Devices that are timed, of a group.
_MOST_BYTES_OF_DEVICES = 5e9  # Of masks, that all devices of a group make together.
_MOST_BYTES_OF_SERVER = 1e10  # Of masks, that the server removes.
_CHUNK_BYTES = 1 << 17
_WORD_BYTES = 4  # Of a key stream, for an entry modulo any of the moduli here.
_SMALL = (vectors.Segment(1, 2),)
_PHASES = ("keys", "shares", "masking", "revealing")
_PHASE_OF = {"directory": "shares", "received_shares": "masking", "survivors": "revealing"}
_GOALS = {"device": 1.5, "unmask": 1.3, "up": 1.15}
_FLOWER = pathlib.Path(__file__).resolve().parent / "peers" / "flower_secure_sums.py"
_PEER_GOAL = 5.0


class _Stopwatch:
    """Processor seconds, by name."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    def __call__(self, name, function, *arguments):
        begin = time.process_time()
        result = function(*arguments)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin
        return result


def _stream(num_masks: int, num_bytes: int) -> float:
    """Processor seconds of the bare key streams of some masks."""
    zeros = bytes(_CHUNK_BYTES)
    buffer = bytearray(_CHUNK_BYTES)
    begin = time.process_time()
    for _ in range(num_masks):
        encryptor = Cipher(algorithms.AES(bytes(32)), modes.CTR(bytes(16))).encryptor()
        for start in range(0, num_bytes, _CHUNK_BYTES):
            chunk = min(_CHUNK_BYTES, num_bytes - start)
            encryptor.update_into(memoryview(zeros)[:chunk], buffer)
    return time.process_time() - begin


def _exchanges(count: int) -> float:
    """Processor seconds of bare X25519 exchanges."""
    private = x25519.X25519PrivateKey.generate()
    public = x25519.X25519PrivateKey.generate().public_key()
    begin = time.process_time()
    for _ in range(count):
        private.exchange(public)
    return time.process_time() - begin


@dataclasses.dataclass(frozen=True)
class Device:
    """What a device took.

    Attributes:
      seconds: By phase.
      stream: Of the bare key stream of its masks.
      exchanges: Of its bare X25519 exchanges.
      up: Bytes that it sent.
      down: Bytes that it was sent.
      plain: Bytes of its vector.
    """

    seconds: Mapping[str, float]
    stream: float
    exchanges: float
    up: int
    down: int
    plain: int

    @property
    def total(self) -> float:
        """Processor seconds in all."""
        return sum(self.seconds.values())


class _Device:
    """A device with a vector of a layout, that is timed."""

    def __init__(self, demanded: parameters.Parameters, session: bytes):
        self._layout = demanded.layout
        self.vector = _random(demanded.layout)
        self._watch = _Stopwatch()
        self._participant = self._watch(
            "keys", device_lib.Participant, demanded, session, self.vector
        )
        self._up = self._down = 0
        self._stream = self._exchanges = 0.0

    def advertise(self) -> secure_sum_pb2.ToServer:
        """Its first message."""
        answer = self._watch("keys", self._participant.advertise)
        self._up += answer.ByteSize()
        return answer

    def answer(
        self, message: secure_sum_pb2.ToDevice, *, is_compared: bool = False
    ) -> secure_sum_pb2.ToServer:
        """Its answer; after that with the masked vector, bare streams are timed if need be."""
        phase = _PHASE_OF[message.WhichOneof("message")]
        answer = self._watch(phase, self._participant.answer, message)
        self._down += message.ByteSize()
        self._up += answer.ByteSize()
        if is_compared and phase == "masking":
            num_neighbours = len(message.received_shares.ciphertexts)
            self._stream = _stream(num_neighbours + 1, _WORD_BYTES * _entries(self._layout))
            self._exchanges = _exchanges(2 * num_neighbours)
        return answer

    @property
    def cost(self) -> Device:
        """What it took."""
        plain = vectors.packed_bytes(self._layout)
        seconds = self._watch.seconds
        return Device(seconds, self._stream, self._exchanges, self._up, self._down, plain)


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What one sum took.

    Attributes:
      devices: Those of which it was measured, by name.
      server: Processor seconds, without unmasking.
      unmasking: Processor seconds.
      num_removed: How many masks were removed.
    """

    devices: Mapping[int, Device]
    server: float
    unmasking: float
    num_removed: int


def simulate(
    neighbourhood: neighbours.Neighbourhood,
    num_dropped: int,
    layout: vectors.Layout,
    timed: Mapping[int, vectors.Layout],
    *,
    is_whole: bool,
) -> Simulated:
    """Makes one sum.

    Args:
      neighbourhood: Of the group.
      num_dropped: How many devices drop out, the last ones.
      layout: Of the server's sum.
      timed: Which devices are measured, and the layout of their own vectors.
      is_whole: Whether all devices have vectors of `layout`; the sum is then verified.
        Otherwise their vectors have one entry, and the server gets random ones.

    Returns:
      What it took.
    """
    n, k = neighbourhood.num_devices, neighbourhood.num_neighbours
    session = parameters.new_session()

    def demanded(own: vectors.Layout) -> parameters.Parameters:
        return parameters.Parameters(
            own,
            parameters.ThreatModel.HONEST_BUT_CURIOUS,
            least_devices=n // 2,
            least_neighbours=None if neighbourhood.complete else k,
        )

    watch = _Stopwatch()
    group = group_lib.Group(
        demanded(layout),
        session,
        num_neighbours=None if neighbourhood.complete else k,
        threshold_fraction=neighbourhood.threshold_fraction,
    )
    devices = [
        _Device(demanded(layout if is_whole else timed.get(i, _SMALL)), session) for i in range(n)
    ]
    for i, device in enumerate(devices):
        watch("server", group.receive, i, device.advertise())
    for i, message in watch("server", group.advance).items():
        watch("server", group.receive, i, devices[i].answer(message))
    content = vectors.pack(_random(layout), layout)
    num_removed = n - num_dropped  # And one for each pair of which one is gone.
    for i, message in watch("server", group.advance).items():
        if i >= n - num_dropped:
            others = [ciphertext.index for ciphertext in message.received_shares.ciphertexts]
            num_removed += sum(other < n - num_dropped for other in others)
            group.drop(i)
            continue
        answer = devices[i].answer(message, is_compared=i in timed)
        if not is_whole:
            answer = secure_sum_pb2.ToServer(masked_vector={"content": content})
        watch("server", group.receive, i, answer)
    for i, message in watch("server", group.advance).items():
        watch("server", group.receive, i, devices[i].answer(message))
    watch("unmasking", group.advance)
    if is_whole:
        _verify(group.total(), [device.vector for device in devices[: n - num_dropped]], layout)
    return Simulated(
        {i: devices[i].cost for i in timed},
        watch.seconds["server"],
        watch.seconds["unmasking"],
        num_removed,
    )


def _random(layout: vectors.Layout) -> vectors.Vector:
    rng = np.random.default_rng()
    return [
        rng.integers(0, segment.modulus, segment.size, np.uint64).astype(segment.dtype)
        for segment in layout
    ]


def _verify(
    total: vectors.Vector, summands: Sequence[vectors.Vector], layout: vectors.Layout
) -> None:
    for i, segment in enumerate(layout):
        plain = sum(vector[i].astype(np.uint64) for vector in summands) % segment.modulus
        if not np.array_equal(total[i], plain):
            raise AssertionError(f"The sum is wrong in segment {i} of {layout}.")


def _mask_seconds(layout: vectors.Layout) -> tuple[float, float]:
    """What it takes to add a mask, and to add a vector that has come."""
    total, content = masks.MaskedSum(layout), vectors.pack(_random(layout), layout)
    repeats = max(3, int(2e8 / len(content)))
    begin = time.process_time()
    total.subtract_masks([bytes(32)] * repeats)
    middle = time.process_time()
    for _ in range(repeats):
        total.add(vectors.unpack(content, layout))
    return (middle - begin) / repeats, (time.process_time() - middle) / repeats


@dataclasses.dataclass(frozen=True)
class Row:
    """Costs of one group.

    Attributes:
      devices: Of those that were measured.
      server: Processor seconds, without unmasking.
      unmasking: Processor seconds.
      stream: Of the bare key streams of the masks that were removed.
      exchanges: Of the bare X25519 exchanges for them.
      mark: "=" where the sum was verified, "~" where the server's part was computed.
    """

    devices: Sequence[Device]
    server: float
    unmasking: float
    stream: float
    exchanges: float
    mark: str


def _entries(layout: vectors.Layout) -> int:
    return sum(segment.size for segment in layout)


def _bare(num_masks: int, num_self_masks: int, layout: vectors.Layout) -> tuple[float, float]:
    """Seconds of bare key streams, and of the exchanges for them; scaled up, if they are many."""
    num_bytes = _WORD_BYTES * _entries(layout)
    masks_ = min(num_masks, max(1, int(2e9 / num_bytes)))
    pairs = num_masks - num_self_masks
    exchanges = min(pairs, 2000)
    return (
        _stream(masks_, num_bytes) * num_masks / masks_,
        _exchanges(exchanges) * pairs / exchanges if pairs else 0.0,
    )


def measure(
    neighbourhood: neighbours.Neighbourhood, num_dropped: int, layouts: Sequence[vectors.Layout]
) -> list[Row]:
    """Costs of one group for vectors of several layouts.

    Args:
      neighbourhood: Of the group.
      num_dropped: How many devices drop out.
      layouts: Of the vectors.

    Returns:
      A row for each layout.
    """
    n, k = neighbourhood.num_devices, neighbourhood.num_neighbours
    num_timed = min(_SAMPLED, n - num_dropped)
    most_removed = (n - num_dropped) + num_dropped * k
    rows: dict[int, Row] = {}
    computed = []
    for j, layout in enumerate(layouts):
        num_bytes = _WORD_BYTES * _entries(layout)
        if most_removed * num_bytes > _MOST_BYTES_OF_SERVER:
            computed.append(j)
            continue
        is_whole = n * (k + 1) * num_bytes <= _MOST_BYTES_OF_DEVICES
        timed = dict.fromkeys(range(num_timed), layout)
        found = simulate(neighbourhood, num_dropped, layout, timed, is_whole=is_whole)
        rows[j] = Row(
            list(found.devices.values()),
            found.server,
            found.unmasking,
            *_bare(found.num_removed, n - num_dropped, layout),
            "=" if is_whole else " ",
        )
    if computed:
        each = min(_SAMPLED, (n - num_dropped) // len(computed))
        timed = {
            i * each + member: layouts[j] for i, j in enumerate(computed) for member in range(each)
        }
        found = simulate(neighbourhood, num_dropped, _SMALL, timed, is_whole=False)
        for i, j in enumerate(computed):
            mask, vector = _mask_seconds(layouts[j])
            rows[j] = Row(
                [found.devices[i * each + member] for member in range(each)],
                found.server + (n - num_dropped) * vector,
                found.unmasking + found.num_removed * mask,
                *_bare(found.num_removed, n - num_dropped, layouts[j]),
                "~",
            )
    return [rows[j] for j in range(len(layouts))]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _neighbourhood(num_devices: int, drop_out_fraction: float) -> neighbours.Neighbourhood:
    if num_devices <= _LARGEST_COMPLETE:
        return neighbours.Neighbourhood(num_devices, num_devices - 1, num_devices // 2 + 1)
    return neighbours.choose(num_devices, _CORRUPT_FRACTION, max(0.1, drop_out_fraction))


def _moduli(size: int, num_devices: int) -> dict[str, int]:
    return {"2^32": 2**32, f"{_BITS} bits": grid.for_bits(size, num_devices, _BITS).modulus}


def show_costs(numbers: Sequence[int], sizes: Sequence[int], percentages: Sequence[float]) -> None:
    """Prints a row for each case."""
    print(
        f"{'n':>5}{'k':>5}{'t':>5}{'d':>9}{'modulus':>9}{'gone':>6}"
        f"{'device ms':>11} = {'+'.join(_PHASES):<31}{'server ms':>10}{'unmask ms':>11} "
        f"{'up':>7}{'down':>7}{'device':>8}{'masking':>8}{'least':>7}{'unmask':>8}{'least':>7}"
    )
    for n in numbers:
        for percentage in percentages:
            neighbourhood = _neighbourhood(n, percentage / 100)
            cases = [
                (size, name, modulus)
                for size in sizes
                for name, modulus in _moduli(size, n).items()
            ]
            layouts = [(vectors.Segment(size, modulus),) for size, _, modulus in cases]
            rows = measure(neighbourhood, round(n * percentage / 100), layouts)
            for (size, name, _), row in zip(cases, rows, strict=True):
                _show_row(neighbourhood, size, name, percentage, row)
    goals = f"{_GOALS['up']:>7g}{'':>7}{_GOALS['device']:>8g}{'':>15}{_GOALS['unmask']:>8g}"
    print(f"{'goals (device: n = 100, up and device: d = 100000)':<104}{goals}")


def _show_row(
    neighbourhood: neighbours.Neighbourhood, size: int, modulus: str, percentage: float, row: Row
) -> None:
    phases = " ".join(
        f"{1e3 * _median([device.seconds[phase] for device in row.devices]):7.2f}"
        for phase in _PHASES
    )
    ratios = [
        _median([seconds(device) / device.stream for device in row.devices])
        for seconds in (
            lambda device: device.total,
            lambda device: device.seconds["masking"],
            lambda device: device.stream + device.exchanges,
        )
    ]
    print(
        f"{neighbourhood.num_devices:>5}{neighbourhood.num_neighbours:>5}"
        f"{neighbourhood.threshold:>5}{size:>9}{modulus:>9}{percentage:>5g}%"
        f"{1e3 * _median([device.total for device in row.devices]):>11.1f} ={phases} "
        f"{1e3 * row.server:>10.0f}{1e3 * row.unmasking:>11.0f}{row.mark}"
        f"{_median([device.up / device.plain for device in row.devices]):>7.3f}"
        f"{_median([device.down / device.plain for device in row.devices]):>7.3f}"
        f"{ratios[0]:>8.2f}{ratios[1]:>8.2f}{ratios[2]:>7.2f}{row.unmasking / row.stream:>8.2f}"
        f"{1 + row.exchanges / row.stream:>7.2f}",
        flush=True,
    )


def show_failures(draws: int) -> None:
    """Prints what is chosen, and bounds beside frequencies."""
    print("chosen for 2^-40 (exposed secrets or a disconnected graph) and 2^-20 (too few shares)")
    header = f"{'n':>7}{'corrupt':>9}{'gone':>6}{'k':>6}{'t':>5}"
    print(header + f"{'log2 exposed':>14}{'disconnected':>14}{'too few':>9}{'without rule':>16}")
    for n in (100, 400, 1000, 4000, 10_000, 100_000):
        for corrupt, gone in ((0.05, 0.1), (0.1, 0.1), (0.1, 0.3), (0.2, 0.2)):
            chosen = neighbours.choose(n, corrupt, gone)
            bounds = neighbours.failure_probabilities(chosen, corrupt, gone)
            free = neighbours.choose(n, corrupt, gone, threshold_fraction=0)
            print(
                f"{n:>7}{corrupt:>9.0%}{gone:>6.0%}{chosen.num_neighbours:>6}"
                f"{chosen.threshold:>5}{bounds.exposed_secrets:>14.1f}"
                f"{bounds.disconnected:>14.1f}{bounds.too_few_shares:>9.1f}"
                f"{f'k={free.num_neighbours} t={free.threshold}':>16}"
            )
    print(f"\nbound and frequency in {draws} draws (and its standard error)")
    print(f"{header}{'too few shares':>28}{'exposed secrets':>28}{'disconnected':>28}")
    for n, corrupt, gone, k, t in (
        (100, 0.2, 0.2, 16, 9),
        (400, 0.2, 0.2, 18, 10),
        (1000, 0.1, 0.3, 20, 8),
        (1000, 0.2, 0.2, 22, 12),
        (4000, 0.2, 0.2, 24, 13),
    ):
        neighbourhood = neighbours.Neighbourhood(n, k, t)
        bounds = neighbours.failure_probabilities(neighbourhood, corrupt, gone)
        seen = _frequencies(neighbourhood, round(n * corrupt), round(n * gone), draws)
        cells = "".join(
            f"{2**bound:>11.4f}{share:>8.4f} ({math.sqrt(share * (1 - share) / draws):.4f})"
            for bound, share in zip(dataclasses.astuple(bounds), seen, strict=True)
        )
        print(f"{n:>7}{corrupt:>9.0%}{gone:>6.0%}{k:>6}{t:>5}{cells}", flush=True)


def _frequencies(
    neighbourhood: neighbours.Neighbourhood, corrupt: int, gone: int, draws: int
) -> np.ndarray:
    """How often shares were too few, secrets exposed, and the graph disconnected."""
    n, k, t = neighbourhood.num_devices, neighbourhood.num_neighbours, neighbourhood.threshold
    ring = np.array(neighbours.random_neighbours(n, k, order=range(n)))
    rng, times = np.random.default_rng(15), np.zeros(3)
    for _ in range(draws):
        roles = rng.permutation(n)
        is_corrupt, is_gone = roles < corrupt, roles >= n - gone
        exposed = (is_corrupt[ring].sum(1) >= t) & ~is_corrupt
        shares = (~is_gone)[ring].sum(1) + ~is_gone
        left = np.flatnonzero(~(is_corrupt | is_gone))
        gaps = np.diff(left, append=left[0] + n) - 1
        times += [(shares < t).any(), exposed.any(), (gaps >= k // 2).sum() >= 2]
    return times / draws


def show_peers(cases: Sequence[str], percentages: Sequence[float], flower: str) -> None:
    """Prints Flower's costs beside ours."""
    print(
        f"{'n':>5}{'d':>9}{'gone':>6}{'':<13}{'device ms':>11}{'server ms':>11}"
        f"{'all, s':>9}{'up':>8}{'down':>8}"
    )
    for case in cases:
        n, size = (int(number) for number in case.split("x"))
        neighbourhood = _neighbourhood(n, 0.3)
        layout = (vectors.Segment(size, 2**32),)
        for percentage in percentages:
            gone = round(n * percentage / 100)
            process = subprocess.run(
                [
                    *(flower, str(_FLOWER), f"--devices={n}", f"--parameters={size}"),
                    *(f"--drop-outs={gone}", f"--neighbours={neighbourhood.num_neighbours}"),
                    f"--threshold={neighbourhood.threshold}",
                ],
                capture_output=True,
                text=True,
            )
            if process.returncode:
                raise RuntimeError(process.stderr[-3000:])
            answer = json.loads(process.stdout.splitlines()[-1])
            (row,) = measure(neighbourhood, gone, [layout])
            plain = vectors.packed_bytes(layout)
            contenders = {
                f"Flower {answer['flwr']}": (
                    sum(answer["device_s"].values()),
                    answer["server_s"],
                    sum(answer["bytes_up"].values()) / plain,
                    sum(answer["bytes_down"].values()) / plain,
                ),
                "tff-dpftrl": (
                    _median([device.total for device in row.devices]),
                    row.server + row.unmasking,
                    _median([device.up for device in row.devices]) / plain,
                    _median([device.down for device in row.devices]) / plain,
                ),
            }
            totals = []
            for name, (device, server, up, down) in contenders.items():
                totals.append((device, server, n * device + server))
                print(
                    f"{n:>5}{size:>9}{percentage:>5g}%  {name:<13}{1e3 * device:>9.1f}"
                    f"{1e3 * server:>11.0f}{totals[-1][2]:>9.1f}{up:>8.2f}{down:>8.2f}"
                )
            times = [peer / own for peer, own in zip(*totals, strict=True)]
            print(
                f"{'times as fast':>31}{times[0]:>11.1f}{times[1]:>11.1f}{times[2]:>9.1f}"
                f"   goal {_PEER_GOAL:g} {'PASS' if times[2] >= _PEER_GOAL else 'MISS'}",
                flush=True,
            )


def main() -> None:
    """Prints the tables that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=["costs", "failures", "peers"])
    parser.add_argument("--quick", action="store_true", help="few cases, or few draws")
    parser.add_argument("--devices", nargs="+", type=int)
    parser.add_argument("--sizes", nargs="+", type=int)
    parser.add_argument("--drop-outs", nargs="+", type=float, metavar="PERCENT")
    parser.add_argument("--cases", nargs="+", metavar="DEVICESxPARAMETERS", help="of peers")
    parser.add_argument("--flower", metavar="PYTHON", help="of Flower's environment")
    given = parser.parse_args()
    if given.table == "costs":
        show_costs(
            given.devices or ([50, 100] if given.quick else [50, 100, 200, 400, 1000, 4000]),
            given.sizes or ([100_000] if given.quick else [100_000, 1_350_000]),
            given.drop_outs or [0, 10, 30],
        )
    elif given.table == "failures":
        show_failures(500 if given.quick else 20_000)
    elif given.flower is None:
        parser.error("peers needs --flower PYTHON")
    else:
        cases = given.cases or ["50x100000", "100x100000"]
        show_peers(cases, given.drop_outs or [10], given.flower)


if __name__ == "__main__":
    main()
