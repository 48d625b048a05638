"""Fleets for a server of `text_service`."""

from __future__ import annotations

import threading
import time

from tests.runtime.fleet import text_service
from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.fleet import behaviour, fleet, tally

_PERFECT = behaviour.Rates(drop_outs=0.0, stragglers=0.0)


def server(folder, address, where=None):
    return fleet.ConnectionSettings(
        address,
        (folder / "server.pem").read_bytes(),
        (signing_keys.raw(signing_keys.load_public(folder / "plans.pem.pub")),),
        signing_keys.load_private(folder / "issuer.pem").private_bytes_raw(),
        issuers=(signing_keys.raw(signing_keys.load_public(folder / "issuer.pem.pub")),),
        folder=where,
    )


def of(folder, address, **options):
    data = text_service.write_corpus(folder)
    values = {"num_devices": 20, "rates": _PERFECT, "start_within_s": 0.2, "usual_wait_s": 1.0}
    return fleet.Fleet(
        server(folder, address), text_service.POPULATION, str(data), **(values | options)
    )


def run(made, *, rounds, seconds=60.0, until=lambda counts: False, **options):
    counts, ends, stop = tally.Tally(), [], threading.Event()

    def on_session_end(end):
        ends.append(end)
        counts.add(end)
        if until(counts):
            stop.set()

    ending, begin = fleet.Ending(rounds=rounds, seconds=seconds), time.monotonic()
    fleet.run(made, ending, stop=stop, on_session_end=on_session_end, **options)
    assert until(counts) or time.monotonic() < begin + seconds  # Or it has not come to its end.
    return counts, ends
