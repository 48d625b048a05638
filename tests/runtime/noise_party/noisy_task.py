"""A task of eleven weights with a noise party, made without TFF, and a server of its rounds."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.runtime.device import wire_server
from tff_dpftrl.discretization import grid
from tff_dpftrl.mechanisms import blt, noise_split
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.private_round import party_noise
from tff_dpftrl.runtime.device import server_connection
from tff_dpftrl.runtime.noise_party import ledger as ledger_lib
from tff_dpftrl.runtime.noise_party import party as party_lib
from tff_dpftrl.runtime.noise_party import promise as promise_lib
from tff_dpftrl.runtime.noise_party import rows as rows_lib
from tff_dpftrl.runtime.plans import plan_pb2, secure_report, tensor_values
from tff_dpftrl.runtime.protocol import noise_party, session_stream, wire_pb2
from tff_dpftrl.runtime.tasks import task_folder
from tff_dpftrl.runtime.tasks import terms as terms_lib
from tff_dpftrl.secure_sums import device, group, parameters, secure_sum_pb2

KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PARTY = KEY.public_key().public_bytes_raw()
OTHER = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
OTHER_PARTY = OTHER.public_key().public_bytes_raw()
SHAPES = ((5,), (2, 3))
DIM, NUM_ROUNDS, CLIP, COUNT_STDDEV = 11, 8, 2.0, 3.0
LEAST, MOST = 2, 6
BLT = blt.Blt((0.9, 0.5), (0.3, 0.2))
COUNT_MODULUS = 2**31 - 1
PARTICIPATION = plan_pb2.Participation(
    min_sep_rounds=1, stride_edges=[1, 2], times_edges=[1, NUM_ROUNDS]
)
NEVER_BEFORE = (np.int32([1, 0, 0]), np.int32([1, 0]))
ROUND_SEED = np.array([5, 6])
PLAN_SHA256 = b"p" * 32


def _tensor(label: str, dtype: str, *shape: int) -> plan_pb2.Tensor:
    return plan_pb2.Tensor(label=label, dtype=dtype, shape=shape)


def make(
    strategy: Any = BLT,
    *,
    adaptive: bool = False,
    parties: tuple[bytes, ...] = (PARTY,),
    z: float = 1.5,
    room: float = 1.0,
    inflation: float | None = None,
    **asked: Any,
) -> task_folder.TaskFolder:
    """Makes the task.

    Args:
      strategy: Strategy of the noise.
      adaptive: Whether the clip norm is learned.
      parties: Raw public keys of the noise parties in the plan.
      z: Noise multiplier of the terms.
      room: Factor on the noise that the grid has room for.
      inflation: Inflation in the terms; that of the grid if None.
      **asked: Changes of the plan's `PartyNoise`.
    """
    update_z = noise_split.update_noise_multiplier(z, COUNT_STDDEV) if adaptive else z
    ratio = party_noise.noise_ratio(strategy, update_z, NUM_ROUNDS, len(parties)) * room
    encoding = grid.for_bits(DIM, MOST, 20, noise_ratio=ratio)
    update = [_tensor("3/0/vector", "int32", encoding.padded_dim), _tensor("3/0/count", "int32")]
    rules = [encoding.sum_modulus, COUNT_MODULUS]
    if adaptive:
        update += [_tensor("3/1/doubled", "int32"), _tensor("3/1/count", "int32")]
        rules += [COUNT_MODULUS, COUNT_MODULUS]
    broadcast = [_tensor("0/trainable/0", "float32", DIM), _tensor("2", "int64", 2)]
    if adaptive:
        broadcast[1:1] = [_tensor("1/active", "float32")]
    norm = plan_pb2.ReportBound.Norm(
        largest=math.sqrt(encoding.max_squared_norm), centre=encoding.max_coordinate
    )
    noise = {
        "round_seed": "2",
        "vector": "3/0/vector",
        "count": "3/1/doubled" if adaptive else "",
        "count_stddev": COUNT_STDDEV if adaptive else 0.0,
        "scaled_clip_norm": encoding.scaled_clip_norm,
        "rejection_bound": encoding.rejection_bound,
        "noise_ratio": ratio,
    }
    server = plan_pb2.ServerPlan(
        population="tests",
        task="noisy",
        update=update,
        secure_sums=[plan_pb2.SecureSum(modulus=modulus) for modulus in rules],
        participation=PARTICIPATION,
        secure_aggregation=plan_pb2.SecureAggregation(
            threat_model=plan_pb2.SecureAggregation.HONEST_BUT_CURIOUS,
            least_devices=LEAST,
            most_devices=MOST,
            noise_parties=parties,
        ),
        prepare=plan_pb2.Graph(outputs=broadcast),
        get_weights=plan_pb2.Graph(
            outputs=[_tensor(f"trainable/{i}", "float32", *shape) for i, shape in enumerate(SHAPES)]
        ),
        report_bounds=[plan_pb2.ReportBound(tensors=[0], norm=norm, noised=True)],
        party_noise=plan_pb2.PartyNoise(**(noise | asked)),
    )
    terms = terms_lib.Terms(
        server_plan="",
        files={},
        kind="training",
        population="tests",
        task="noisy",
        num_devices=100,
        schema=schema_lib.MinSep(num_rounds=NUM_ROUNDS, min_sep=1, max_participations=NUM_ROUNDS),
        delta=1e-5,
        strategy=strategy,
        noise_multiplier=z,
        clip_norm=CLIP,
        adaptive_clipping=adaptive,
        max_epsilon=None,
        data="numbers",
        vocabulary_source=None,
        vocabulary_is_public=True,
        initial_weights_source=None,
        initial_weights_are_public=False,
        parameters={
            "clients_per_round": 4,
            "secagg_norm_inflation": encoding.inflation if inflation is None else inflation,
        },
    )
    signed = plan_pb2.SignedTask(devices=[plan_pb2.SignedPlan(sha256=PLAN_SHA256)])
    return task_folder.TaskFolder(pathlib.Path("noisy"), signed, server, (), terms, None)


def broadcast(task: task_folder.TaskFolder, clip_norm: float = CLIP) -> bytes:
    """Serialises what devices of a round get."""
    values = [np.zeros(DIM, np.float32), ROUND_SEED.astype(np.int64)]
    if task.terms.adaptive_clipping:
        values[1:1] = [np.float32(clip_norm)]
    return tensor_values.to_bytes([np.asarray(value) for value in values])


class Rounds:
    """A script of `wire_server.WireServer`: one attempt in each session, with three devices.

    Attributes:
      task: The task.
      requests: Configurations to send, one a session: changes of the usual fields.
      check_ins: Announcements of the party.
      totals: Sums of the attempts.
      stages: Names of the steps that the server has taken, for faults.
      at: Callback that is called with the name of each step.
    """

    def __init__(self, task: task_folder.TaskFolder, requests: list[dict[str, Any]]):
        self.task, self.requests = task, list(requests)
        self.parameters = secure_report.parameters_of(task.server)
        self.check_ins: list[wire_pb2.NoiseParty] = []
        self.totals: list[Any] = []
        self.at = lambda step: None
        self.accepts = True

    def __call__(self, session):
        try:
            yield from self._session(session)
        except StopIteration:  # The party has gone.
            return

    def _session(self, session):
        challenge = b"c" * 32
        yield wire_server.challenge_of(challenge)
        check_in = session.receive("check_in")
        nonce = session_stream.attested_nonce(challenge, "127.0.0.1", check_in.population)
        assert noise_party.is_signed(check_in.noise_party, [nonce])
        assert not check_in.token
        self.check_ins.append(check_in.noise_party)
        if not self.requests:
            yield wire_server.come_back(0.0, reason="no round", finished=True)
            return
        fields = {
            "attempt": f"attempt {len(self.check_ins)}",
            "task": "noisy",
            "round_index": check_in.noise_party.next_round,
            "broadcast": broadcast(self.task),
            "secure_sum_session": parameters.new_session(),
            "plan_sha256": PLAN_SHA256,
        } | self.requests.pop(0)
        self.at("check-in")
        yield wire_server.configuration(**fields)
        yield from self._sum(session, fields)

    def _sum(self, session, fields):
        context = session_stream.secure_sum_context(
            fields["task"], fields["round_index"], fields["broadcast"]
        )
        name = fields["secure_sum_session"]
        server = group.Group(self.parameters, name, context=context)
        layout = self.parameters.layout
        devices = []
        for i in range(3):
            vector = [np.zeros(segment.size, segment.dtype) for segment in layout]
            vector[0][:] = 1
            vector[3][:] = i
            devices.append(device.Participant(self.parameters, name, vector, context=context))
        server.receive("party", self._from_party(session))
        self.at("keys")
        for i, one in enumerate(devices):
            server.receive(i, one.advertise())
        while messages := server.advance():
            for receiver, message in messages.items():
                if receiver == "party":
                    self.at("request")
                    content = message.SerializeToString()
                    yield wire_pb2.FromServer(secure_sum=content)
                    server.receive("party", self._from_party(session))
                    self.at("vector")
                else:
                    server.receive(receiver, devices[receiver].answer(message))
        self.totals.append(server.total())
        yield wire_server.answer(self.accepts, reason="" if self.accepts else "round abandoned")

    def _from_party(self, session):
        content = b""
        while (message := session.next_message()).WhichOneof("message") == "update_part":
            content += message.update_part
        read = secure_sum_pb2.ToServer.FromString(message.secure_sum)
        if content:
            read.masked_vector.content = content
        return read


@dataclasses.dataclass
class Running:
    """A party beside its server."""

    party: party_lib.Party
    ledger: ledger_lib.Ledger
    connection: server_connection.ServerConnection
    lines: list[str] = dataclasses.field(default_factory=list)

    def run(self, sessions: int | None = None) -> None:
        """Runs the party until the server has no further round, or for a number of sessions."""
        left = iter(range(10**6 if sessions is None else sessions))
        self.party.run(
            wait=lambda seconds: None,
            should_stop=lambda: next(left, None) is None,
            progress=self.lines.append,
        )

    def close(self) -> None:
        """Ends the party, as a kill does."""
        self.ledger.close()
        self.connection.close()


def start(
    task: task_folder.TaskFolder, folder: pathlib.Path, server: wire_server.WireServer, **options
) -> Running:
    """Starts a party on a folder, as the command does."""
    promise = promise_lib.Promise(task, PARTY)
    ledger = ledger_lib.Ledger.open(
        folder / "noisy.ledger", task.name, task.terms.digest(), **options
    )
    connection = server_connection.ServerConnection(
        server.address,
        server.root_certificates,
        patience=server_connection.Patience(
            answer_s=20.0, selection_s=20.0, upload_s=20.0, group_s=20.0
        ),
    )
    rows = rows_lib.Rows(promise.noise, ledger, folder / "noisy.noise")
    party = party_lib.Party(connection, promise, ledger, rows, KEY, clock=lambda: 0.0)
    return Running(party, ledger, connection)
