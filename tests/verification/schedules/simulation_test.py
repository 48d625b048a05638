"""Ten thousand schedules keep the laws, and every planted mistake is found by some."""

import collections

import pytest

from tests.verification.schedules import mistakes
from tff_dpftrl.runtime.actors import factory
from verification.schedules import faults, noise_parties, simulation, watch

SCHEDULES = 10_000  # 42 seconds of one core of the machine that this was written on.
SCHEDULES_BY_DEFAULT = 100
SECURE_SCHEDULES = 1_000
SECURE_BY_DEFAULT = 40
TWO_BY_DEFAULT = 20
SCHEDULES_PER_MISTAKE = 400
RESTING_SCHEDULES = 25


@pytest.mark.parametrize("has_mergers", [False, True], ids=["flat", "merged"])
@pytest.mark.parametrize(
    "schedules", [SCHEDULES_BY_DEFAULT, pytest.param(SCHEDULES, marks=pytest.mark.slow)]
)
def test_the_laws_hold_in_every_schedule(schedules, has_mergers):
    seen = collections.Counter()
    served = simulation.merging_population() if has_mergers else simulation.small_population()
    for seed in range(schedules):
        watched = simulation.Simulation(seed, served=served).run()
        assert not watched.broken, f"schedule {seed}: {watched.broken}"
        seen.update(watched.seen)
    # They hold although all of this happened, and often.
    for what in (
        "rounds of training",
        "rounds of evaluation",
        "RoundLost",
        "CommitRefused",
        "actors stopped",
        "killed: coordinator",
        "killed: round",
        "killed: aggregator",
        "killed: selector",
        "killed: store",
        "reports refused: late",
        "reports refused: duplicate",
        "reports refused: unusable",
        *(["killed: merger"] if has_mergers else []),
    ):
        assert seen[what] > schedules // 20, what
    # In some schedules another Coordinator led before the faults ended, in many more than one.
    assert seen["leases"] > 1.3 * schedules


@pytest.mark.parametrize("has_mergers", [False, True], ids=["flat", "merged"])
@pytest.mark.parametrize(
    "schedules", [SECURE_BY_DEFAULT, pytest.param(SECURE_SCHEDULES, marks=pytest.mark.slow)]
)
def test_secure_sums_are_exact_or_lost_in_every_schedule(schedules, has_mergers):
    seen = collections.Counter()
    served = (
        simulation.secure_merging_population() if has_mergers else simulation.secure_population()
    )
    for seed in range(schedules):
        watched = simulation.Simulation(seed, served=served).run()
        assert not watched.broken, f"schedule {seed}: {watched.broken}"
        seen.update(watched.seen)
    for what in (
        "rounds of training",
        "RoundLost",
        "killed: aggregator",
        "summed_groups",
        "lost_groups",
        "reports refused: late",
        "reports refused: unusable",
        "reports refused: group lost",
    ):
        assert seen[what] > schedules // 20, what
    assert not has_mergers or seen["killed: merger"] > schedules // 100


@pytest.mark.parametrize(
    ("is_secure", "schedules"),
    [
        (False, TWO_BY_DEFAULT),
        (True, TWO_BY_DEFAULT // 2),
        pytest.param(False, SCHEDULES, marks=pytest.mark.slow),
        pytest.param(True, SECURE_SCHEDULES, marks=pytest.mark.slow),
    ],
)
def test_the_laws_hold_with_two_populations_in_every_schedule(is_secure, schedules):
    """All devices are in both populations, and train for one at a time; one has mergers."""
    first = simulation.merging_population()
    second = simulation.small_population("second")
    if is_secure:
        second = simulation.secure_population("second", 2 * simulation.NUM_DEVICES)
    seen = {"simulated": collections.Counter(), "second": collections.Counter()}
    for seed in range(schedules):
        simulated = simulation.Simulation(seed, served=first, beside=[second])
        simulated.run()
        for name, watched in simulated.watches.items():
            assert not watched.broken, f"schedule {seed}, {name}: {watched.broken}"
            seen[name].update(watched.seen)
    for name in seen:
        for what in ("rounds of training", "rounds of evaluation", "RoundLost", "killed: selector"):
            assert seen[name][what] > schedules // 20, (name, what)
    assert bool(seen["second"]["summed_groups"]) == is_secure
    assert is_secure or seen["simulated"]["killed: merger"] > schedules // 20


def test_a_device_that_gets_into_another_populations_sum_is_found():
    simulated = simulation.Simulation(
        0, going_wrong=faults.NONE, beside=[simulation.small_population("second")]
    )
    for device in simulated._devices[: simulation.NUM_DEVICES]:
        device._selectors = simulated._factories["second"].selectors
    simulated.run()
    assert watch.Law.OWN_DEVICES in {law for law, _ in simulated.watches["second"].broken}


def test_two_populations_whose_devices_are_the_same_both_go_on_when_nothing_goes_wrong():
    for seed in range(5):
        simulated = simulation.Simulation(
            seed, going_wrong=faults.NONE, beside=[simulation.small_population("second")]
        )
        simulated.run()
        for watched in simulated.watches.values():
            assert not watched.broken and watched.seen["leases"] == 1
            assert watched.rounds_committed("training") >= 3


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "secure"])
@pytest.mark.parametrize("min_sep", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "num_devices", [3, *(pytest.param(number, marks=pytest.mark.slow) for number in (4, 5)), 8]
)
def test_devices_that_rest_are_enough_for_a_round_again(num_devices, min_sep, is_secure):
    """Whatever went wrong, and however few devices there are, rounds are released again."""
    served = simulation.resting_population(min_sep, is_secure=is_secure)
    seen = collections.Counter()
    for seed in range(RESTING_SCHEDULES):
        simulated = simulation.Simulation(seed, served=served, num_devices=num_devices)
        watched = simulated.run()
        assert not watched.broken, f"schedule {seed}: {watched.broken}"
        seen.update(watched.seen)
    assert seen["skipped rounds of training"] > RESTING_SCHEDULES // 10


def test_rounds_follow_one_another_when_nothing_goes_wrong():
    evaluations = []
    for seed in range(20):
        watched = simulation.Simulation(seed, going_wrong=faults.NONE).run()
        assert not watched.broken
        assert watched.seen["leases"] == 1
        assert watched.rounds_committed("training") >= 4
        evaluations.append(watched.rounds_committed("evaluation"))
        assert not watched.seen["CommitRefused"]
    assert min(evaluations) >= 1 and sum(evaluations) >= 2 * len(evaluations)


def test_a_schedule_is_its_seed():
    def run(seed):
        simulated = simulation.Simulation(seed)
        return simulated.run().seen, simulated.time

    assert run(3) == run(3)
    assert len({run(seed)[1] for seed in range(5)}) == 5


FOUND_BY = {
    "CommitsWithoutLookingAtTheEpoch": watch.Law.FRESH_EPOCH,
    "CommitsWithoutLookingAtTheRound": watch.Law.ONE_COMMIT,
    "ForgetsAttempts": watch.Law.ONE_ATTEMPT,
    "GivesTheSameEpochAgain": watch.Law.ONE_OWNER,
    "ReleasesBeforeTheCommit": watch.Law.COMMIT_FIRST,
    "ShowsMetricsBeforeTheCommit": watch.Law.COMMIT_FIRST,
    "ComputesAgainForARetry": watch.Law.COMMIT_FIRST,
    "CountsReportsTwice": watch.Law.COUNTED_ONCE,
    "CountsSumsTwice": watch.Law.COUNTED_ONCE,
    "TakesTooFewReports": watch.Law.ENOUGH_REPORTS,
    "NeverReadsAgain": watch.Law.PROGRESS,
    "NeverGivesUp": watch.Law.PROGRESS,
    "TriesTheSameRoundAgain": watch.Law.PROGRESS,
    "SkipsWithoutEnd": watch.Law.FEW_SKIPS,
    "DoesNotCareWhoLeads": watch.Law.PROGRESS,
}
# Found where devices are few and rest.
NEEDS_REST = ("TriesTheSameRoundAgain", "SkipsWithoutEnd")


MERGING_FOUND_BY = {
    "MergesSumsTwice": watch.Law.COUNTED_ONCE,
    "CountsWhatItDoesNotMerge": watch.Law.EXACT_COUNT,
}
SECURE_FOUND_BY = {
    "AddsVectorsThatComeAgain": watch.Law.EXACT_SUM,
    "CountsWhoWasThere": watch.Law.EXACT_COUNT,
}


def test_every_mistake_is_tried():
    assert set(FOUND_BY) == {*mistakes.FACTORIES, *mistakes.STORES}
    assert set(SECURE_FOUND_BY) == set(mistakes.SECURE_FACTORIES)
    assert set(MERGING_FOUND_BY) == set(mistakes.MERGING_FACTORIES)


@pytest.mark.parametrize("mistake", FOUND_BY)
def test_a_planted_mistake_is_found(mistake):
    for seed in range(SCHEDULES_PER_MISTAKE):
        watched = simulation.Simulation(
            seed,
            actor_factory=mistakes.FACTORIES.get(mistake, factory.ActorFactory),
            store=mistakes.STORES[mistake]() if mistake in mistakes.STORES else None,
            served=simulation.resting_population(2) if mistake in NEEDS_REST else None,
            num_devices=4 if mistake in NEEDS_REST else simulation.NUM_DEVICES,
        ).run()
        if FOUND_BY[mistake] in {law for law, _ in watched.broken}:
            print(f"found by schedule {seed}")
            return
    pytest.fail(f"no schedule before {SCHEDULES_PER_MISTAKE} found it")


@pytest.mark.parametrize(
    ("mistake", "law", "factories", "served"),
    [
        *(
            (*one, mistakes.SECURE_FACTORIES, "secure_population")
            for one in SECURE_FOUND_BY.items()
        ),
        *(
            (*one, mistakes.MERGING_FACTORIES, "merging_population")
            for one in MERGING_FOUND_BY.items()
        ),
    ],
)
def test_a_mistake_of_other_aggregators_is_found(mistake, law, factories, served):
    for seed in range(SCHEDULES_PER_MISTAKE):
        watched = simulation.Simulation(
            seed, actor_factory=factories[mistake], served=getattr(simulation, served)()
        ).run()
        if law in {law for law, _ in watched.broken}:
            print(f"found by schedule {seed}: {watched.broken}")
            return
    pytest.fail(f"no schedule before {SCHEDULES_PER_MISTAKE} found it")


@pytest.mark.parametrize("parties", [1, 2])
@pytest.mark.parametrize(
    "schedules", [SECURE_BY_DEFAULT // 4, pytest.param(SECURE_SCHEDULES, marks=pytest.mark.slow)]
)
def test_the_noise_of_a_party_is_in_one_sum_of_its_round_in_every_schedule(schedules, parties):
    seen = collections.Counter()
    served = simulation.noised_population(parties)
    for seed in range(schedules):
        watched = simulation.Simulation(seed, served=served).run()
        assert not watched.broken, f"schedule {seed}: {watched.broken}"
        seen.update(watched.seen)
    for what in (
        "rounds of training",
        "skipped rounds of training",
        "RoundLost",
        "summed_groups",
        "lost_groups",
        "killed: coordinator",
        "reports refused: group lost",
    ):
        assert seen[what] > schedules // 20, what


class _Forgetful(noise_parties.Party):
    """A noise party that loses its ledger when it dies."""

    def disconnect(self, seconds):
        self._next_row = 0
        super().disconnect(seconds)


def test_a_noise_party_that_forgets_what_it_gave_is_found(monkeypatch):
    monkeypatch.setattr(noise_parties, "Party", _Forgetful)
    served, laws = simulation.noised_population(), set()
    dying = faults.Faults(killed=0.01, killed_together=1.0)  # All of the server at once.
    for seed in range(SCHEDULES_PER_MISTAKE):
        # A store with notes of attempts would not let the party be asked a second time.
        store = mistakes.ForgetsAttempts()
        watched = simulation.Simulation(seed, served=served, going_wrong=dying, store=store).run()
        laws |= {law for law, _ in watched.broken}
        if watch.Law.NOISE_ONCE in laws:
            return
    raise AssertionError(laws)
