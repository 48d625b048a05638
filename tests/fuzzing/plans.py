"""Kinds of signed content: plans, their graphs, and privacy terms; all of it needs TensorFlow.

Whoever does not have the key can change what is around the signed bytes. What a trusted key has
signed may be wrong as well, so that it is changed and signed again here.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import random
from collections.abc import Callable

import tensorflow as tf
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.fuzzing import judging, messages, mutations
from tests.runtime.plans import plain_plans, secure_plans
from tff_dpftrl.mechanisms import blt
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runtime.plans import device_work, plan_pb2, signing, verification
from tff_dpftrl.runtime.tasks import secure_groups
from tff_dpftrl.runtime.tasks import terms as terms_lib

KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEYS = [KEY.public_key()]
TERMS = terms_lib.Terms(
    server_plan="f" * 64,
    files={"config.json": "e" * 64},
    kind="training",
    population="tests",
    task="small",
    num_devices=100,
    schema=schema_lib.MinSep(num_rounds=6, min_sep=2, max_participations=3),
    delta=1e-5,
    strategy=blt.Blt((0.9, 0.5), (0.3, 0.2)),
    noise_multiplier=0.5,
    clip_norm=1.0,
    adaptive_clipping=False,
    max_epsilon=None,
    data="numbers",
    vocabulary_source="nothing",
    vocabulary_is_public=True,
    initial_weights_source=None,
    initial_weights_are_public=False,
    parameters={"clients_per_round": 3},
    secure_aggregation=secure_groups.SecureGroups("honest-but-curious", 2, 0.5),
)


def _counted(examples: tf.Tensor, scale: tf.Tensor) -> list[tf.Tensor]:
    """An update with a loop and a condition, and thus functions in its library."""
    count = tf.while_loop(
        lambda i, s: i < 3, lambda i, s: [i + 1, s * 2], [tf.size(examples), scale]
    )
    return [tf.cond(scale > 0, lambda: count[1], lambda: scale), count[0][None]]


@functools.cache
def _plans() -> list[plan_pb2.DevicePlan]:
    participation = {"participation": secure_plans.PARTICIPATION}
    return [
        plain_plans.plan(**participation),
        plain_plans.plan(_counted, **participation),
        plain_plans.plan(secure_aggregation=secure_plans.wanted(), **participation),
    ]


def signed_again(content: bytes) -> bytes:
    """A device plan of any bytes with the signature of the trusted key."""
    digest = hashlib.sha256(content).digest()
    return plan_pb2.SignedPlan(
        plan=content,
        sha256=digest,
        key=signing.key_name(KEYS[0]),
        signature=KEY.sign(signing._signed(plan_pb2.DevicePlan, digest)),
    ).SerializeToString()


def _plan(content: bytes, other: bytes, drawn: random.Random) -> bytes:
    return signed_again(mutations.protobuf(content, other, drawn))


def _graph(content: bytes, other: bytes, drawn: random.Random) -> bytes:
    """A change to the graph, in a plan that declares what it has."""
    plan = plan_pb2.DevicePlan.FromString(content)
    others = plan_pb2.DevicePlan.FromString(other).graph.graph_def
    plan.graph.graph_def = mutations.protobuf(plan.graph.graph_def, others, drawn)
    try:
        graph_def = tf.compat.v1.GraphDef.FromString(plan.graph.graph_def)
        plan.ops[:] = verification.operations(graph_def)
    except (messages.unreadable(), ValueError):
        pass
    return signed_again(plan.SerializeToString())


def _serialized() -> list[bytes]:
    return [plan.SerializeToString() for plan in _plans()]


def _verify(content: bytes) -> None:
    verification.read_device_plan(content, KEYS)


def _load(content: bytes) -> None:
    device_work.load(content, KEYS)


def _terms_kind() -> judging.Kind:
    def prepare(folder: pathlib.Path) -> Callable[[random.Random], judging.Case]:
        del folder
        content, signature = TERMS.signed(KEY)
        name = signing.key_name(KEYS[0])

        def make(drawn: random.Random) -> judging.Case:
            if drawn.random() < 0.2:
                changed, signed = content, mutations.scattered(signature, name, drawn)
            else:
                changed = mutations.json_text(content, content, drawn)
                signed = name + KEY.sign(terms_lib._signed(changed))
            return judging.Case(lambda: terms_lib.verified(changed, signed, KEYS))

        return make

    return judging.Kind("privacy terms", prepare, (terms_lib.TermsRefusedError,))


_REFUSED = (signing.PlanRefusedError,)
KINDS = (
    messages.kind(
        "signed plan",
        lambda: [signing.sign(plan, KEY).SerializeToString() for plan in _plans()],
        _verify,
        refusals=_REFUSED,
    ),
    messages.kind("plan signed again", _serialized, _verify, mutate=_plan, refusals=_REFUSED),
    messages.kind("graph of a plan", _serialized, _verify, mutate=_graph, refusals=_REFUSED),
    _terms_kind(),
)
"""All of them."""

LOADED = messages.kind("graph, loaded", _serialized, _load, mutate=_graph, refusals=_REFUSED)
"""Of what is verified, TensorFlow imports the graph: slow."""
