import dataclasses
import random

from tff_dpftrl.runtime.actors import actor, aggregator, messages, roles
from verification.schedules import simulation

TASK = simulation.small_population().task("training")
ROLE = roles.AggregatorRole(
    "attempt", "training", 5, b"the model", ("a", "b", "c"), parent="attempt"
)


def make(task=TASK):
    made = aggregator.Aggregator("sums", task, ROLE, random.Random(0), lambda *_: (7.0, 9.0))
    return made, made.start(0.0)


def sent(effects, to=None):
    return [
        effect.message
        for effect in effects
        if isinstance(effect, actor.Send) and to in (None, effect.to)
    ]


def report(made, device, payload="x", attempt="attempt"):
    return made.step(1.0, messages.Report(device, attempt, payload))


def refusal(effects):
    (refused,) = [one for one in sent(effects) if isinstance(one, messages.ReportRefused)]
    return refused.refusal


def test_its_devices_are_configured():
    _, effects = make()
    assert sent(effects, "b") == [
        messages.Configure("b", "sums", "attempt", "training", 5, b"the model")
    ]
    assert len(sent(effects)) == 3


def test_reports_are_summed_and_acknowledged():
    made, _ = make()
    effects = report(made, "a", "one")
    assert sent(effects, "a") == [messages.ReportAccepted("a", "attempt", (7.0, 9.0))]
    assert sent(effects, "attempt") == [messages.ReportsCounted("sums", 1, 2)]
    report(made, "c", "two")
    (handed,) = sent(made.step(2.0, messages.CloseReporting()), "attempt")
    assert handed.total == ["one", "two"]
    assert handed.counts == {"reports": 2, "outstanding": 1}
    assert made.step(2.0, messages.CloseReporting()) == []  # The sum is handed over once.


def test_who_has_taken_part_rests():
    made, _ = make(dataclasses.replace(TASK, rest_seconds=100.0))
    (accepted,) = sent(report(made, "a"), "a")
    assert accepted.turns == (107.0, 109.0)


def test_every_refusal_has_a_name_and_changes_no_sum():
    made, _ = make()
    report(made, "a", "one")
    assert refusal(report(made, "a", "again")) is messages.Refusal.DUPLICATE
    assert refusal(report(made, "stranger")) is messages.Refusal.NOT_SELECTED
    assert refusal(report(made, "b", attempt="another")) is messages.Refusal.WRONG_ATTEMPT
    effects = report(made, "b", 5)
    assert refusal(effects) is messages.Refusal.UNUSABLE
    assert sent(effects, "b")[0].reason == "the report is not a name"
    assert sent(effects, "attempt") == [messages.ReportsCounted("sums", 1, 1)]
    assert refusal(report(made, "b", "second try")) is messages.Refusal.DUPLICATE
    (handed,) = sent(made.step(2.0, messages.CloseReporting()), "attempt")
    assert handed.total == ["one"]
    assert refusal(report(made, "c", "late")) is messages.Refusal.LATE
    assert refusal(report(made, "a", "late")) is messages.Refusal.DUPLICATE
    assert handed.counts == {
        "reports": 1,
        "duplicate": 2,
        "not selected": 1,
        "wrong attempt": 1,
        "unusable": 1,
        "outstanding": 1,
    }


def test_who_dropped_out_is_not_waited_for():
    made, _ = make()
    effects = made.step(1.0, messages.DeviceGone("a"))
    assert sent(effects) == [messages.ReportsCounted("sums", 0, 2)]
    assert made.step(1.0, messages.DeviceGone("a")) == []
    assert refusal(report(made, "a")) is messages.Refusal.NOT_SELECTED


def test_who_has_sent_nothing_is_given_up_and_who_sends_is_not():
    made, _ = make()
    report(made, "a")
    assert made.step(1.0, messages.ReportBegun("b")) == []
    effects = made.step(1.0, messages.DropSilent())
    assert sent(effects) == [messages.ReportsCounted("sums", 1, 1)]
    assert refusal(report(made, "c")) is messages.Refusal.LATE
    assert made.step(1.0, messages.DeviceGone("c")) == []
    assert sent(report(made, "b"), "b") == [messages.ReportAccepted("b", "attempt", (7.0, 9.0))]
    assert made.step(1.0, messages.DropSilent()) == []
    (handed,) = sent(made.step(2.0, messages.CloseReporting()), "attempt")
    assert handed.counts == {"reports": 2, "dropped": 1, "late": 1, "outstanding": 0}
    assert made.step(2.0, messages.DropSilent()) == []


def test_a_sum_holds_no_more_reports_than_it_has_room_for():
    role = dataclasses.replace(ROLE, most_reports=1)
    made = aggregator.Aggregator("sums", TASK, role, random.Random(0), lambda *_: (7.0,))
    made.start(0.0)
    report(made, "c", 5)  # An unusable report takes no room.
    report(made, "a", "one")
    assert refusal(report(made, "b", "two")) is messages.Refusal.LATE
    (handed,) = sent(made.step(2.0, messages.CloseReporting()), "attempt")
    assert (handed.total, handed.counts["reports"]) == (["one"], 1)


def test_it_ends_when_its_master_has_forgotten_it():
    made, effects = make()
    (timer,) = [effect for effect in effects if isinstance(effect, actor.After)]
    assert timer.seconds == TASK.rounds.longest
    assert made.step(timer.seconds, timer.message) == [actor.Stop("sums")]


def test_what_is_printed_of_messages_holds_no_report_and_no_model():
    _, effects = make()
    reply = messages.Report("a", "attempt", "what I typed")
    assert "typed" not in repr(reply) and "the model" not in repr(effects)
    assert "the model" not in repr(ROLE)
    assert dataclasses.asdict(reply)["payload"] == "what I typed"
