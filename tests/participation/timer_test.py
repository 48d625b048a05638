import collections
import heapq
import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tff_dpftrl.participation import timer

deterministic = hypothesis.settings(deadline=None, derandomize=True)

FLAT = (1.0,) * 24


@st.composite
def models(draw):
    num_clients = draw(st.integers(1, 60))
    return timer.TimerModel(
        num_clients=num_clients,
        clients_per_round=draw(st.integers(1, num_clients)),
        timer_hours=draw(st.sampled_from([0.0, 0.5, 24.0, 100.0])),
        checkins_per_day=draw(st.sampled_from([0.2, 1.0, 50.0])),
        hourly_availability=draw(
            st.sampled_from([timer.NIGHT_AND_DAY, FLAT, (1.0, 0.0) * 12, (0.0,) * 23 + (1.0,)])
        ),
        overhead_minutes=draw(st.sampled_from([0.0, 5.0])),
    )


@deterministic
@hypothesis.given(models(), st.integers(0, 2**32), st.integers(1, 40))
def test_devices_rest_and_the_population_caps_the_stride(model, seed, num_rounds):
    returns = collections.defaultdict(lambda: -math.inf)
    before = 0.0
    for end, cohort in itertools.islice(model.rounds(seed), num_rounds):
        assert len(set(cohort.tolist())) == model.clients_per_round
        assert end >= before + model.overhead_minutes / 60 - 1e-9
        for device in cohort.tolist():
            # Somebody who is still resting cannot have checked in before the round's end.
            assert returns[device] <= end
            returns[device] = end + model.timer_hours
        before = end
    outcome = timer.simulate(model, num_rounds, seed)
    if outcome.observed.min_sep is not None:
        assert outcome.observed.min_sep <= max(1, model.num_clients // model.clients_per_round)


@deterministic
@hypothesis.given(models(), st.integers(0, 2**32))
def test_the_sampler_repeats_the_simulation_and_respects_its_schema(model, seed):
    sampler = timer.TimerSampler(model, num_rounds=12, seed=seed)
    expected = [cohort.tolist() for _, cohort in itertools.islice(model.rounds(seed), 12)]
    assert [sampler.cohort(t).tolist() for t in reversed(range(12))] == expected[::-1]
    rounds = collections.defaultdict(list)
    for t, cohort in enumerate(expected):
        for device in cohort:
            rounds[device].append(t)
    assert all(sampler.schema.allows(r) for r in rounds.values())


def simulate_device_by_device(model, num_rounds, rng):
    """The same model, told as one clock for each device; returns when the last round ended."""
    peak = max(model.hourly_availability)
    per_hour = model.checkins_per_day / sum(model.hourly_availability) * peak

    def next_checkin(after):
        while True:  # Thinning of a process at the peak rate.
            after += rng.exponential(1 / per_hour)
            if rng.random() * peak < model.hourly_availability[int(after % 24)]:
                return after

    queue = [(next_checkin(0.0), device) for device in range(model.num_clients)]
    heapq.heapify(queue)
    now = 0.0
    for _ in range(num_rounds):
        cohort = []
        while len(cohort) < model.clients_per_round:
            checkin, device = heapq.heappop(queue)
            if checkin < now:  # Nobody listened: a round was under way.
                heapq.heappush(queue, (next_checkin(now), device))
                continue
            now = checkin
            cohort.append(device)
        now += model.overhead_minutes / 60
        for device in cohort:
            heapq.heappush(queue, (next_checkin(now + model.timer_hours), device))
    return now


@pytest.mark.parametrize(
    "availability", [pytest.param(FLAT, marks=pytest.mark.slow), timer.NIGHT_AND_DAY]
)
def test_agrees_with_a_simulation_device_by_device(availability):
    model = timer.TimerModel(
        num_clients=24,
        clients_per_round=6,
        timer_hours=20.0,
        checkins_per_day=2.0,
        hourly_availability=availability,
        overhead_minutes=30.0,
    )
    runs, num_rounds = 400, 8
    rng = np.random.default_rng(0)
    slow = np.array([simulate_device_by_device(model, num_rounds, rng) for _ in range(runs)])
    fast = np.array([timer.simulate(model, num_rounds, seed).end_hours[-1] for seed in range(runs)])
    margin = 6 * math.hypot(slow.std(), fast.std()) / math.sqrt(runs)
    assert abs(slow.mean() - fast.mean()) < margin
    assert margin < 0.1 * slow.mean()  # Power: without the timer it is over 30 % sooner.
    impatient = timer.TimerModel(24, 6, 0.0, 2.0, availability, 30.0)
    sooner = np.array(
        [timer.simulate(impatient, num_rounds, seed).end_hours[-1] for seed in range(50)]
    )
    assert sooner.mean() < slow.mean() - 2 * margin


def test_the_first_round_waits_as_long_as_order_statistics_say():
    # The m-th of N exponential times at rate r has mean sum 1 / (r (N - i)), i < m.
    model = timer.TimerModel(50, 20, 1.0, 24.0, FLAT, 0.0)
    waits = np.array([next(model.rounds(seed))[0] for seed in range(2_000)])
    mean = sum(1 / (50 - i) for i in range(20))
    variance = sum(1 / (50 - i) ** 2 for i in range(20))
    assert abs(waits.mean() - mean) < 6 * math.sqrt(variance / len(waits))


def test_throughput_in_the_long_run_is_that_of_renewal_theory():
    # A device's cycle: its timer, 1 / rate until it checks in, half a round of waiting.
    num_clients, clients_per_round, hours, rate = 10_000, 50, 24.0, 1.0
    model = timer.TimerModel(num_clients, clients_per_round, hours, 24 * rate, FLAT, 0.0)
    end_hours = timer.simulate(model, 6_000, seed=0).end_hours
    measured = 4_000 / (end_hours[-1] - end_hours[-4_001])
    per_round = clients_per_round / num_clients
    cycle = hours + 1 / rate
    assert measured == pytest.approx(1 / (per_round * (cycle + 0.5 * per_round * cycle)), rel=0.01)


def min_seps(hours):
    """Of a population that allows a stride of at most 100."""
    return [
        timer.simulate(timer.TimerModel(40_000, 400, h), num_rounds=500, seed=3).min_sep
        for h in hours
    ]


def test_min_sep_grows_with_the_timer_until_the_population_caps_it():
    separations = min_seps([0, 4, 8, 24, 48, 96, 480])
    assert separations == sorted(separations)
    assert separations[1] < 0.5 * separations[3]
    assert separations[3] == pytest.approx(separations[-1], rel=0.02)  # Longer is of no more use.
    assert 70 <= separations[-1] <= 100


def test_timers_should_be_whole_days():
    # "We increase the timer period in the unit of 24 hours due to the uneven diurnal
    # participation pattern" (Xu et al. 2023, section 2.2).
    day, day_and_a_half, two_days = min_seps([24, 36, 48])
    assert day_and_a_half < 0.9 * min(day, two_days)


def test_where_rounds_are_paced_min_sep_is_proportional_to_the_timer():
    # "MinS can proportionally increase with the timer period" (Xu et al. 2023, 2.2).
    computed = [
        timer.simulate(timer.TimerModel(100_000, 50, hours), 1_500, seed=3).min_sep
        for hours in (24, 48, 72)
    ]
    assert computed[1] / computed[0] == pytest.approx(2, rel=0.05)
    assert computed[2] / computed[0] == pytest.approx(3, rel=0.05)


def test_too_few_rounds_cap_min_sep_too():
    outcome = timer.simulate(timer.TimerModel(1_000, 5, 240.0), 30, seed=0)
    assert outcome.observed.min_sep is None
    assert outcome.min_sep == 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hours", "num_rounds", "published_gap", "published_participations"),
    [(24, 2_000, 313, 6), (144, 1_900, 526, 3)],
)
def test_gboard_es_es(hours, num_rounds, published_gap, published_participations):
    # Xu et al. 2023, section 2.2 and Table 1: 4.21M devices, report goal 6,500.
    outcome = timer.simulate(timer.TimerModel(4_210_000, 6_500, hours), num_rounds, seed=0)
    assert outcome.observed.min_sep_gap == pytest.approx(published_gap, rel=0.03)
    assert abs(outcome.observed.max_participations - published_participations) <= 1
    assert outcome.min_sep <= 647


@pytest.mark.parametrize(
    "changed",
    [
        {"clients_per_round": 0},
        {"clients_per_round": 101},
        {"timer_hours": -1.0},
        {"timer_hours": math.nan},
        {"overhead_minutes": math.inf},
        {"checkins_per_day": 0.0},
        {"hourly_availability": (1.0,) * 23},
        {"hourly_availability": (0.0,) * 24},
        {"hourly_availability": (-1.0,) + (1.0,) * 23},
    ],
)
def test_bad_arguments_are_named(changed):
    arguments = {"num_clients": 100, "clients_per_round": 10, "timer_hours": 24.0, **changed}
    [name] = changed
    with pytest.raises(ValueError, match=name):
        timer.TimerModel(**arguments)
