"""Devices that check in, are chosen and send nothing do not stop the rounds of the others."""

import dataclasses
import math

import pytest

from tff_dpftrl.runtime.actors import messages, population
from verification.schedules import faults, simulation, toy_task

HONEST = SILENT = 40
SECONDS = 45.0  # Of the attack.
WARM_UP = 15.0  # Seconds in which the server serves honest devices alone.
SEEDS = range(4)
ROUNDS = population.RoundSettings(
    goal_count=10,
    over_selection=1.3,
    least_fraction=0.8,
    selection_timeout=10.0,
    reporting_timeout=20.0,
    exchange_timeout=2.0,
)


class PatientRounds(population.RoundSettings):
    """Rounds that wait for silent devices up to the reporting time-out."""

    def patience(self, half_seconds):
        return math.inf


def served(rounds, *, is_secure=False):
    summation, secure_sum = toy_task.NameSum(), None
    if is_secure:
        summation = toy_task.SecureNameSum()
        secure_sum = toy_task.secure_sum(HONEST + SILENT)
        rounds = dataclasses.replace(rounds, devices_per_aggregator=7, secure_step_timeout=3.0)
    task = population.Task(
        "training", rounds, summation, toy_task.NameStep(), secure_sum=secure_sum
    )
    return dataclasses.replace(simulation.small_population(), tasks=(task,))


class Hoarding(simulation.Simulation):
    """A schedule in which some devices come back at once, and never report once chosen.

    Attributes:
      chosen: How often honest devices were chosen, under False, and silent ones, under True.
    """

    def __init__(
        self, seed, num_silent, *, peers=HONEST, silent_peers=1, rounds=ROUNDS, is_secure=False
    ):
        """Sets the stage; the first devices are honest.

        Args:
          seed: Seed of the schedule.
          num_silent: Number of silent devices, beside the honest ones.
          peers: Number of network addresses of honest devices; with 0, all devices have one.
          silent_peers: Number of network addresses of silent devices.
          rounds: Sizes and time-outs of rounds.
          is_secure: Whether reports are summed securely.
        """
        self._peers, self._silent_peers = peers, silent_peers
        self.chosen = {True: 0, False: 0}
        super().__init__(
            seed,
            going_wrong=faults.NONE,
            served=served(rounds, is_secure=is_secure),
            num_devices=HONEST + num_silent,
        )

    def _is_silent(self, address):
        return int(address.partition(".")[0]) >= HONEST

    def _peer(self, address):
        number = int(address.partition(".")[0])
        if not self._peers:
            return "everybody"
        if self._is_silent(address):
            return f"silent {number % self._silent_peers}"
        return f"honest {number % self._peers}"

    def _send(self, sender, to, message, held=0.0):
        if isinstance(message, messages.CheckIn):
            message = dataclasses.replace(message, peer=self._peer(sender))
        if isinstance(message, (messages.Report, messages.SecureSumMessage)):
            if self._is_silent(sender):
                return
        if isinstance(message, messages.Configure):
            self.chosen[self._is_silent(to)] += 1
        super()._send(sender, to, message, held)

    def _wake_later(self, seconds, device, what):
        if what == "connect" and self._is_silent(device._name):
            seconds = max(0.2, WARM_UP - self.time)
        super()._wake_later(seconds, device, what)

    def commits(self, seconds=SECONDS):
        """Runs it, and returns the number of released rounds in the seconds of the attack."""
        self._run_until(WARM_UP)
        before = self.watch.rounds_committed("training")
        self._run_until(WARM_UP + seconds)
        assert not self.watch.broken
        return self.watch.rounds_committed("training") - before


def commits(num_silent, seeds=SEEDS, seconds=SECONDS, **options):
    return sum(Hoarding(seed, num_silent, **options).commits(seconds) for seed in seeds)


@pytest.fixture(scope="module")
def undisturbed():
    return commits(0)


@pytest.mark.parametrize(
    "peers",
    [
        pytest.param(HONEST, id="devices", marks=pytest.mark.slow),
        pytest.param(4, id="a fleet of four connections"),
    ],
)
def test_one_host_with_as_many_silent_sessions_costs_less_than_half_of_the_commits(
    peers, undisturbed
):
    under_attack = commits(SILENT, peers=peers)
    print(f"{under_attack} commits of {undisturbed}")
    assert under_attack >= undisturbed / 2


def test_secure_sums_go_on_beside_silent_devices():
    seeds = SEEDS[:2]
    undisturbed = commits(0, seeds, is_secure=True)
    under_attack = commits(SILENT, seeds, is_secure=True)
    print(f"{under_attack} commits of {undisturbed}")
    assert under_attack >= undisturbed / 2


@pytest.mark.parametrize(
    ("seconds", "factor"), [(SECONDS, 2), pytest.param(2 * SECONDS, 3, marks=pytest.mark.slow)]
)
def test_without_limits_few_commits_are_left(undisturbed, seconds, factor):
    """The attack is one: nobody is told apart, and silent devices are waited for."""
    rounds = PatientRounds(**{**dataclasses.asdict(ROUNDS), "most_over_selection": 1.0})
    under_attack = commits(SILENT, seconds=seconds, peers=0, rounds=rounds)
    assert under_attack < undisturbed / 10
    # Where attackers have as many addresses as devices, what is learned helps all the same. Each
    # failed attempt doubles the time of the next, as devices may have become slower, so that the
    # first 45 s bring less than later ones. The seeds 0 to 15, by four: 11, 13, 16, 11 commits
    # against 4, 4, 4, 5 in 45 s, and 18, 18, 22, 20 against the same 4, 4, 4, 5 in 90 s.
    learned = commits(SILENT, seconds=seconds, silent_peers=SILENT)
    print(f"{under_attack} commits of {undisturbed}, {learned} from as many addresses")
    assert learned > factor * under_attack


def test_devices_that_fall_silent_hold_up_only_the_first_attempts():
    """Half of the devices of one address fall silent for good."""
    adapted = commits(SILENT, peers=0)
    print(f"{adapted} commits")
    patient = PatientRounds(**dataclasses.asdict(ROUNDS))
    assert adapted > 2 * commits(SILENT, peers=0, rounds=patient)


def test_few_more_participations_are_used_up_when_nobody_is_silent():
    declared = dataclasses.replace(ROUNDS, most_over_selection=1.0)
    used = []
    for rounds in (declared, ROUNDS):
        runs = [Hoarding(seed, 0, rounds=rounds) for seed in SEEDS]
        done = sum(run.commits() for run in runs)
        used.append(sum(run.chosen[False] for run in runs) / done)
    print(f"{used} honest devices are chosen for each commit")
    assert used[1] <= 1.05 * used[0]
