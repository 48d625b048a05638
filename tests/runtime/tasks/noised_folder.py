"""Task of a few weights whose noise a noise party adds, and the same with the server's noise."""

from __future__ import annotations

import dataclasses
import functools

from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.runtime.plans import small_tasks
from tests.runtime.tasks import small_folder
from tff_dpftrl.discretization import grid
from tff_dpftrl.private_round import adaptive_clipping, party_noise
from tff_dpftrl.runtime.plans import bounding, building, plan_pb2
from tff_dpftrl.runtime.tasks import task_folder

SEED = 7
KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes([5]) * 32)
PARTY = KEY.public_key().public_bytes_raw()
CLIPPING = small_tasks.CLIPPING
_TERMS = small_folder.SECURE_TERMS


@functools.cache
def plans(*parties: bytes, adaptive: bool = False, **options: object) -> building.Plans:
    """Builds the plans; without parties the server adds the noise, on the same grid."""
    demanded = plan_pb2.SecureAggregation()
    demanded.CopyFrom(small_tasks.SECURE_AGGREGATION)
    demanded.noise_parties.extend(parties)
    process, made = _process(parties, adaptive)
    return small_folder.plans(process, secure_aggregation=demanded, **made, **options)


@functools.cache
def _process(parties, adaptive):
    """Builds the process, and what building its plans needs to know."""
    z, strategy = _TERMS.noise_multiplier, _TERMS.strategy
    update_z = z
    if adaptive:
        update_z = adaptive_clipping.AdaptiveClipRound(
            strategy, clipping=CLIPPING, noise_multiplier=z, clients_per_round=3
        ).update_noise_multiplier
    num_rounds = _TERMS.schema.num_rounds
    ratio = party_noise.noise_ratio(strategy, update_z, num_rounds, max(len(parties), 1))
    encoding = grid.for_bits(4, 8, 20, noise_ratio=ratio)
    secagg = small_tasks.secagg(
        encoding,
        clipping_=CLIPPING if adaptive else None,
        strategy=strategy,
        noise_multiplier=z,
        deterministic_seed=SEED,
        noise_parties=len(parties),
    )
    limits = bounding.ReportLimits(clip_norm="active" if adaptive else 1.0, encoding=encoding)
    process = small_tasks.federated_averaging(secagg, small_tasks.SECURE_METRICS)
    return process, {"report_limits": limits, "private_round": secagg.private_round}


def terms(*parties: bytes, adaptive: bool = False):
    """Returns the terms of the task."""
    secure = dataclasses.replace(
        _TERMS.secure_aggregation, noise_parties=tuple(party.hex() for party in parties)
    )
    made = plans(*parties, adaptive=adaptive).server
    inflation = grid.GridEncoding(
        4,
        8,
        made.party_noise.scaled_clip_norm or 1.0,
        noise_ratio=made.party_noise.noise_ratio,
    ).inflation
    return dataclasses.replace(
        _TERMS,
        secure_aggregation=secure,
        adaptive_clipping=adaptive,
        parameters={**_TERMS.parameters, "secagg_norm_inflation": inflation},
    )


def write(path, *parties: bytes, adaptive: bool = False, **options) -> task_folder.TaskFolder:
    """Writes the task to a new folder, and reads it."""
    config = small_folder.CONFIG.changed(
        mechanism="blt",
        secagg_bits=20,
        secure_aggregation="honest-but-curious",
        least_group=2,
        noise_party=",".join(party.hex() for party in parties) or None,
        **options,
    )
    small_folder.write_plans(
        path,
        plans(*parties, adaptive=adaptive),
        terms=terms(*parties, adaptive=adaptive),
        config=config,
    )
    return task_folder.read(path, small_tasks.KEYS)
