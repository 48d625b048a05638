"""Fleets against a real server: rounds are committed, whatever some of the devices do."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.runtime.fleet import fleets, text_service
from tff_dpftrl.runtime.device import session
from tff_dpftrl.runtime.fleet import behaviour, fleet, tally
from tff_dpftrl.runtime.plans import plan_pb2
from tff_dpftrl.runtime.server import server_folder


def test_rounds_are_committed_with_the_texts_of_users(tmp_path):
    served = text_service.Served(tmp_path, over_selection=1.0, least_fraction=1.0)
    with served.running() as address:
        counts, ends = fleets.run(fleets.of(tmp_path, address), rounds=3)
    history = served.released()
    assert len(history) >= 3
    assert all(row["reports"] == 6 and row["letters"] > 0 for row in history[:3])
    assert counts.shapes["-v[]+^"] == sum(counts.rounds.values()) >= 18
    assert not counts.failures
    assert {end.task for end in ends} <= {"letters", ""}
    # Devices told the server of their sessions in calls of their own.
    assert ("session_summarized", "-v[]+^") in served.observer.calls


def test_faults_and_attacks_cost_reports_and_rounds_go_on(tmp_path):
    served = text_service.Served(tmp_path)
    rates = behaviour.Rates(drop_outs=0.2, stragglers=0.3, straggler_s=0.4, malicious=0.3)
    with served.running() as address:
        counts, _ = fleets.run(
            fleets.of(tmp_path, address, rates=rates, num_devices=30),
            rounds=100,
            until=lambda counts: len(counts.rounds) >= 6 and len(served.released()) >= 6,
        )
    history = served.released()
    # On a busy machine a round's attempts may all run out of time: it is skipped.
    assert len(history) >= 6 and len(history) >= len(served.rows()) / 2
    assert all(math.isfinite(row["letters"]) for row in history)
    shapes = set(counts.shapes)
    assert {"-v[]+^", "-v[]+#"} <= shapes and shapes & {"-!", "-v[!", "-v[]+!"}
    table = counts.table()
    assert table[1][0] == "-v[]+^ " and table[1][3] == "75%"


_HONEST, _ACTIVE = (
    plan_pb2.SecureAggregation.HONEST_BUT_CURIOUS,
    plan_pb2.SecureAggregation.ACTIVE_SERVER,
)


@pytest.mark.parametrize("threat_model", [_HONEST, pytest.param(_ACTIVE, marks=pytest.mark.slow)])
def test_secure_sums_go_on_whatever_devices_do(tmp_path, threat_model):
    served = text_service.Served(tmp_path, threat_model=threat_model)
    rates = behaviour.Rates(drop_outs=0.3, stragglers=0.3, straggler_s=0.4, malicious=0.2)
    with served.running() as address:
        counts, ends = fleets.run(
            fleets.of(tmp_path, address, rates=rates, num_devices=30),
            rounds=100,
            until=lambda counts: len(counts.rounds) > 6 and counts.shapes["-v[]+!"],
        )
    history = served.released()
    assert len(history) >= 6
    assert all(3 <= row["reports"] <= 9 for row in history)
    # Some users have no text. If many devices went away, a round may consist of such users only.
    assert all((row["letters"] > 0) == (row["texts"] > 0) for row in history)
    assert any(row["texts"] for row in history)
    assert all(row["devices/summed_groups"] == 1 for row in history)
    went_away = " ".join(
        end.reason for end in ends if end.outcome is session.SessionOutcome.INTERRUPTED
    )
    assert "went away before its" in went_away
    assert counts.shapes["-v[]+!"] and counts.shapes["-v[]+^"]


_QUICK = (behaviour.Attack.NAN, behaviour.Attack.TOKEN)


_REASONS = {  # In the clear, and where reports are summed securely.
    behaviour.Attack.NAN: ("unusable: not finite", "unusable: A public key"),
    behaviour.Attack.SHAPE: ("unusable", "unusable: No masked vector"),
    behaviour.Attack.GARBAGE: ("unusable: content cannot be read", "unusable: the message cannot"),
    behaviour.Attack.ATTEMPT: ("attempt", "in the clear"),
    behaviour.Attack.TOKEN: ("token for another nonce", "token for another nonce"),
}


@pytest.mark.parametrize("is_secure", [False, True], ids=["in the clear", "secure"])
@pytest.mark.parametrize(
    "attack",
    [pytest.param(a, marks=[] if a in _QUICK else [pytest.mark.slow]) for a in behaviour.Attack],
)
def test_every_attack_is_refused_by_name(tmp_path, attack, is_secure):
    """All devices attack: no round comes to an end, and the server says why."""
    served = text_service.Served(tmp_path, threat_model=_HONEST if is_secure else None)
    rates = behaviour.Rates(drop_outs=0, stragglers=0, malicious=1.0, attacks=(attack,))
    with served.running() as address:
        counts, ends = fleets.run(
            fleets.of(tmp_path, address, rates=rates),
            rounds=1,
            until=lambda counts: sum((counts.refusals + counts.failures).values()) >= 12,
        )
    reasons = " ".join({*counts.refusals, *counts.failures})
    assert _REASONS[attack][is_secure] in reasons, reasons
    assert not counts.rounds
    assert not served.released()
    if attack is behaviour.Attack.TOKEN:
        assert {end.outcome for end in ends} == {session.SessionOutcome.ATTESTATION_FAILED}


def test_devices_rest_as_long_as_the_plan_says(tmp_path):
    served = text_service.Served(tmp_path, min_sep=3, over_selection=1.0)
    with served.running() as address:
        counts, _ = fleets.run(fleets.of(tmp_path, address, num_devices=40), rounds=8)
    assert len(counts.rounds) >= 8
    # Who rests lets turns go, rather than come and be refused by its own timer.
    resting = counts.others[session.SessionOutcome.RESTING]
    assert resting < sum(counts.rounds.values())


@pytest.mark.slow
def test_several_processes_share_the_devices(tmp_path):
    served = text_service.Served(tmp_path)
    with served.running() as address:
        counts, _ = fleets.run(
            fleets.of(tmp_path, address), rounds=4, num_processes=2, seconds=90.0
        )
    assert len(counts.rounds) >= 4


def test_a_server_that_is_gone_ends_nothing_but_sessions(tmp_path):
    served = text_service.Served(tmp_path)
    with served.running() as address:
        pass
    counts, _ = fleets.run(
        fleets.of(tmp_path, address, num_devices=3),
        rounds=1,
        until=lambda counts: counts.others[session.SessionOutcome.FAILED] >= 3,
    )
    assert counts.shapes == {} and not counts.rounds
    [reason] = counts.failures
    assert reason.startswith(f"{address} cannot be reached")


def test_an_ending_waits_for_the_late_reports_of_the_last_round():
    now = [0.0]
    ending = fleet.Ending(rounds=2, clock=lambda: now[0])

    def end(shape, round_index):
        outcome = session.SessionOutcome.COMPLETED
        ending.add(tally.SessionEnd(shape, outcome, "", "task", round_index))

    end("-v[]+^", 7)
    now[0] = 100.0
    assert not ending.is_reached()
    end("-v[]+^", 8)
    assert not ending.is_reached()
    now[0] += 4.0
    end("-v[]+#", 8)
    now[0] += 4.0
    assert not ending.is_reached()
    now[0] += 2.0
    assert ending.is_reached()
    end("-v[]+^", 9)
    assert ending.is_reached()
    assert not fleet.Ending(seconds=5.0, clock=lambda: 0.0).is_reached()


def test_a_fleet_ends_when_the_tasks_are_finished():
    now = [0.0]
    ending = fleet.Ending(clock=lambda: now[0])
    ending.add(tally.SessionEnd("-v[]+^", session.SessionOutcome.COMPLETED, "", "task", 7))
    now[0] = 1000.0
    assert not ending.is_reached()
    ending.add(tally.SessionEnd("-v[]+#", session.SessionOutcome.REPORT_REFUSED, "late", "task", 7))
    ending.add(tally.SessionEnd("-#", session.SessionOutcome.FINISHED, "all rounds are done"))
    assert not ending.is_reached()  # Other devices may still report.
    now[0] += 5.0
    assert ending.is_reached()


def test_a_fleet_finds_its_server_where_the_folder_says_now(tmp_path):
    """It starts with an address that has gone; one of those in the folder answers."""
    gone = "127.0.0.1:1"
    folder = server_folder.of(tmp_path / "server")
    folder.path.mkdir()
    served = text_service.Served(tmp_path, over_selection=1.0, least_fraction=1.0)
    with served.running() as address:
        folder.write_endpoint(f"{gone},{address}", "")
        made = fleets.of(tmp_path, gone)
        found = fleets.server(tmp_path, gone, str(folder.path))
        counts, _ = fleets.run(dataclasses.replace(made, server=found), rounds=1)
    assert counts.rounds and "-*" not in counts.shapes


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"num_devices": 0}, "num_devices"),
        ({"seed": -1}, "seed"),
        ({"max_sessions": 0}, "max_sessions"),
        ({"start_within_s": -1}, "start_within_s"),
        ({"day_s": 0}, "day_s"),
    ],
)
def test_bad_fleets_are_named(changed, name):
    server = fleet.ConnectionSettings("localhost:1", b"", ())
    with pytest.raises(ValueError, match=name):
        fleet.Fleet(server, "p", "docs", **({"num_devices": 1} | changed))
