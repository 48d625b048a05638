import json
import math
import pathlib
import re

import prometheus_client
import pytest
from prometheus_client import parser

from tests.runtime.server import example_secure_task
from tests.runtime.status import watched
from tff_dpftrl.runtime.actors import events
from tff_dpftrl.runtime.status import metrics

_DOCS = pathlib.Path(__file__).parents[3] / "docs"
HOSTILE = 'a"b\\c\n<script>{task="x"} 1'


def families(seen, **privacy):
    text = prometheus_client.generate_latest(metrics.registry(seen, lambda: privacy)).decode()
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def value(found, name, **labels):
    for family in found.values():
        for sample in family.samples:
            if sample.name == "tff_dpftrl_" + name and sample.labels == labels:
                return sample.value
    raise KeyError((name, labels))


def test_groups_of_secure_sums_are_counted():
    told = watched.Watched(
        secure_sum=example_secure_task.task().secure_sum, rounds=example_secure_task.task().rounds
    )
    told.lead()
    told.begin()
    counts = {"devices/summed_groups": 2, "devices/lost_groups": 1}
    released = events.RoundReleased("train", 0, told.attempt, counts)
    told.on_event(released)
    told.on_event(released)  # A new Coordinator says it again.
    told.begin()
    told.on_event(events.RoundLost("train", 1, told.attempt, "too few reports", {"lost_groups": 3}))
    found = families(told.seen)
    assert value(found, "secure_sum_groups_total", task="train", outcome="summed") == 2
    assert value(found, "secure_sum_groups_total", task="train", outcome="lost") == 4
    with pytest.raises(KeyError):
        plain = families(watched.Watched().seen)
        value(plain, "secure_sum_groups_total", task="train", outcome="lost")


def test_a_round_is_in_the_metrics():
    told = watched.Watched(HOSTILE)
    told.lead(3)
    told.begin(HOSTILE, devices=6)
    told.clock.now += 5
    told.report(HOSTILE, 4)
    told.report(HOSTILE, 1, refusal="late")
    found = families(told.seen)
    assert value(found, "round_devices", task=HOSTILE) == 6
    assert value(found, "round_reports", task=HOSTILE) == 4
    assert value(found, "round_goal_reports", task=HOSTILE) == 4
    assert value(found, "devices", state="participating") == 1
    told.drop()
    told.clock.now += 5
    told.commit(HOSTILE)
    told.tell()
    told.seen.session_refused("expired token")
    told.on_event(events.StoreFailed("x"))
    found = families(told.seen)
    assert value(found, "lease_epoch") == 3
    assert value(found, "store_failures_total") == 1
    assert value(found, "sessions_total") == 6
    assert value(found, "sessions_refused_total", reason="expired token") == 1
    assert value(found, "devices", state="connected") == 0
    assert value(found, "devices_configured_total") == 6
    assert value(found, "devices_dropped_total", phase="participating") == 1
    assert value(found, "rounds_done", task=HOSTILE) == 1
    assert value(found, "rounds_committed_total", task=HOSTILE) == 1
    assert value(found, "last_commit_time_seconds", task=HOSTILE) == watched.START + 10
    assert value(found, "reports_total", task=HOSTILE, outcome="accepted") == 4
    assert value(found, "reports_total", task=HOSTILE, outcome="late") == 1
    assert value(found, "sent_bytes_total", task=HOSTILE) == 6000
    assert value(found, "received_bytes_total", task=HOSTILE) == 500
    assert value(found, "session_shapes_total", shape="-v[]+^") == 1
    assert value(found, "session_shapes_total", shape="-v[]+#") == 0
    assert value(found, "round_duration_seconds_sum", task=HOSTILE) == 10
    assert value(found, "round_duration_seconds_bucket", task=HOSTILE, le="8") == 0
    assert value(found, "round_duration_seconds_bucket", task=HOSTILE, le="16") == 1
    assert value(found, "participation_duration_seconds_count", task=HOSTILE) == 4
    assert value(found, "session_duration_seconds_count") == 1
    assert value(found, "device_peak_memory_bytes_sum") == 3e8
    assert value(found, "alerts", kind="store") == 1
    told.clock.now += 60 * 86_400  # The table forgets; a counter may not.
    told.tell()
    assert told.seen.session_table.total == 1
    assert value(families(told.seen), "session_shapes_total", shape="-v[]+^") == 2
    assert value(found, "alerts", kind="drop_outs") == 0


def test_abandoned_rounds_have_their_reason():
    told = watched.Watched()
    told.begin()
    told.lose()
    found = families(told.seen)
    assert value(found, "rounds_abandoned_total", task="train", reason="too few reports") == 1


def test_epsilon_is_infinite_without_a_guarantee():
    told = watched.Watched("train", "open", "evaluate")
    privacy = {"train": {"epsilon": 1.5}, "open": {"epsilon": None}, "unknown": {"epsilon": 1.0}}
    found = families(told.seen, **privacy)
    assert value(found, "privacy_epsilon", task="train") == 1.5
    assert value(found, "privacy_epsilon", task="open") == math.inf
    assert len(found["tff_dpftrl_privacy_epsilon"].samples) == 2


def test_every_metric_has_a_help_text_and_every_name_a_unit_where_it_has_one():
    told = watched.Watched()
    told.lose()
    for name, family in families(told.seen).items():
        assert family.documentation.endswith((".", "nobody leads.")), name
        assert name.startswith("tff_dpftrl_")
        if "duration" in name or "time" in name:
            assert name.endswith("_seconds")


def test_the_number_of_series_is_bounded_whatever_devices_say():
    told = watched.Watched()

    def count():
        return sum(len(family.samples) for family in families(told.seen).values())

    before = count()
    for i in range(500):
        told.tell(shape=f"<{i}>", versions={"python": str(i)})
        told.seen.session_refused(f"reason {i}")
        told.seen.sent_away(f"reason {i}", False)
        told.seen.reported("train", f"reason {i}", 1)
        told.lose(reason=f"reason {i}")
    assert count() - before <= 25 + 25 + 13


def test_the_dashboard_shows_metrics_that_there_are():
    told = watched.Watched(
        secure_sum=example_secure_task.task().secure_sum, rounds=example_secure_task.task().rounds
    )
    told.lose()
    told.seen.session_refused("expired token")
    told.seen.sent_away("enough devices are waiting", False)
    exported = {
        sample.name: set(sample.labels)
        for family in families(told.seen, train={"epsilon": 1.0}).values()
        for sample in family.samples
    }
    board = json.loads((_DOCS / "how_to" / "grafana_dashboard.json").read_text(encoding="utf-8"))
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    assert len(targets) > 20
    for target in targets:
        named = re.findall(r"tff_dpftrl_\w+", target["expr"])
        assert named, target
        for name in named:
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert labels <= exported[name], target
