"""One schedule: actors, devices, a clock, and what goes wrong, all from a seed."""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Callable, Sequence

from tff_dpftrl.runtime.actors import actor, events, factory, messages, population, roles
from tff_dpftrl.runtime.store import interface
from verification import memory_store
from verification.schedules import devices, faults, noise_parties, toy_task, watch

SELECTORS = ("selector/0", "selector/1")
STORE = "store"
NUM_DEVICES = 8
_QUICKEST, _SLOWEST = 0.001, 0.05  # Seconds that a message takes when nothing is wrong.
_RESTART_SECONDS = 1.0
_NOTICE_SECONDS = 0.3
# Virtual seconds.
FAULTY_SECONDS = 30.0
PROGRESS_SECONDS = 90.0


def small_population(name: str = "simulated") -> population.Population:
    """Makes a training task, and an evaluation of its model, with rounds of a few devices."""
    sizes = {
        "over_selection": 1.3,
        "least_fraction": 0.6,
        "selection_timeout": 6.0,
        "reporting_timeout": 6.0,
        "devices_per_aggregator": 2,
        "exchange_timeout": 2.0,
    }
    summation = toy_task.NameSum()
    training = population.Task(
        "training",
        population.RoundSettings(goal_count=3, **sizes),
        summation,
        toy_task.NameStep(),
        weight=2.0,
    )
    evaluation = population.Task(
        "evaluation",
        population.RoundSettings(goal_count=2, **sizes),
        summation,
        toy_task.NameStep(has_model=False),
        model_of="training",
        pipelined=False,
    )
    return population.Population(
        name,
        (training, evaluation),
        lease_seconds=8.0,
        heartbeat_seconds=2.0,
        silence_seconds=5.0,
    )


def resting_population(min_sep: int, *, is_secure: bool = False) -> population.Population:
    """Makes a training task alone, whose devices rest between their rounds.

    Args:
      min_sep: Smallest stride between two rounds of one device.
      is_secure: Whether its reports are summed securely.

    Returns:
      The population. Its rounds need two devices at least.
    """
    plain = secure_population() if is_secure else small_population()
    training = dataclasses.replace(plain.tasks[0], min_sep=min_sep, pipelined=min_sep == 1)
    return dataclasses.replace(plain, tasks=(training,))


def secure_population(
    name: str = "simulated", num_devices: int = NUM_DEVICES
) -> population.Population:
    """Makes both tasks, with the training task summed securely, in rounds of one group or two."""
    plain = small_population(name)
    training, evaluation = plain.tasks
    rounds = dataclasses.replace(
        training.rounds,
        goal_count=5,
        least_fraction=0.4,
        devices_per_aggregator=3,
        secure_step_timeout=3.0,
    )
    training = dataclasses.replace(
        training,
        rounds=rounds,
        summation=toy_task.SecureNameSum(),
        secure_sum=toy_task.secure_sum(num_devices),
    )
    return dataclasses.replace(plain, tasks=(training, evaluation))


def noised_population(num_parties: int = 1) -> population.Population:
    """Makes a training task alone, in rounds of one group with noise parties.

    Args:
      num_parties: Number of the noise parties, which the simulation then has, too.

    Returns:
      The population.
    """
    plain = secure_population()
    training = plain.tasks[0]
    training = dataclasses.replace(
        training,
        rounds=dataclasses.replace(training.rounds, devices_per_aggregator=NUM_DEVICES),
        secure_sum=toy_task.secure_sum(NUM_DEVICES, noise_parties.public_keys(num_parties)),
    )
    return dataclasses.replace(plain, tasks=(training,))


def merging_population() -> population.Population:
    """Makes both tasks with an Aggregator for each device, and a tree of merges above them."""
    return _merging(small_population(), devices_per_aggregator=1)


def secure_merging_population() -> population.Population:
    """Makes a training task alone, summed securely in three groups below a tree of merges."""
    sizes = {"goal_count": 6, "over_selection": 1.0, "least_fraction": 0.3}
    served = _merging(secure_population(), devices_per_aggregator=2, **sizes)
    return dataclasses.replace(served, tasks=served.tasks[:1])


def _merging(served: population.Population, **sizes: float) -> population.Population:
    training, evaluation = served.tasks
    rounds = dataclasses.replace(training.rounds, max_fan_in=2, **sizes)
    return dataclasses.replace(
        served, tasks=(dataclasses.replace(training, rounds=rounds), evaluation)
    )


def _pace(now: float, randomness: random.Random) -> tuple[float, ...]:
    del now
    return (randomness.uniform(0.5, 3.0),)


class Simulation:
    """One schedule.

    Attributes:
      watch: What happened in it, in its first population.
      watches: What happened in each population, by name.
      time: Virtual seconds since its beginning.
    """

    def __init__(
        self,
        seed: int,
        *,
        actor_factory: type[factory.ActorFactory] = factory.ActorFactory,
        store: interface.Store | None = None,
        going_wrong: faults.Faults | None = None,
        served: population.Population | None = None,
        beside: Sequence[population.Population] = (),
        num_devices: int = NUM_DEVICES,
    ):
        """Sets the stage.

        Args:
          seed: All that happens follows from it.
          actor_factory: Builds the actors; another one may build them with mistakes.
          store: A store without tasks; one in memory if None.
          going_wrong: What goes wrong; drawn from the seed if None.
          served: What is served; `small_population` if None.
          beside: Further populations of the same server, with other names. All devices are in all
            populations; in the k-th one, the number of device i is `k * num_devices + i`.
          num_devices: Number of devices.
        """
        self._random = random.Random(seed)
        served = small_population() if served is None else served
        self._populations = {one.name: one for one in (served, *beside)}
        self._num_devices = num_devices
        self.watches = {
            name: watch.Watch(one, range(k * num_devices, (k + 1) * num_devices))
            for k, (name, one) in enumerate(self._populations.items())
        }
        self.watch = self.watches[served.name]
        self._store = watch.WatchedStore(store or memory_store.MemoryStore(), self.watches)
        self._factories: dict[str, factory.ActorFactory] = {}
        self._places: dict[str, str] = {}  # Populations by the addresses of permanent actors.
        for name, one in self._populations.items():
            for task in one.tasks:
                seed_of_noise = f"{task.name} noise"
                state = toy_task.initial_state(task.name, seed_of_noise)
                self._store.add_task(name, task.name, model=b"", state=state)
            selectors, place = SELECTORS, STORE
            if beside:
                selectors, place = tuple(f"{each}/{name}" for each in SELECTORS), f"{STORE}/{name}"
            self._places |= dict.fromkeys((place, *selectors), name)
            self._factories[name] = actor_factory(
                one, selectors=selectors, pace=_pace, store_address=place
            )
        self._faults = faults.draw(self._random) if going_wrong is None else going_wrong
        self.time = 0.0
        self._openings = dict.fromkeys(self._populations, events.SelectionOpened("", 0))
        self._serial = 0
        self._queue: list[tuple] = []
        self._actors: dict[str, actor.Actor] = {}
        self._parents: dict[str, str] = {}
        self._skews: dict[str, float] = {}
        self._stopped_until: dict[str, float] = {}
        for place in self._places:
            self._restart(place)
        turns = [devices.Turn() for _ in range(num_devices)]
        self._devices: list[devices.Device | noise_parties.Party] = [
            devices.Device(
                f"{k * num_devices + i}",
                self._factories[name].selectors,
                {task.name: task for task in one.tasks},
                self._random,
                self._send,
                self._wake_later,
                lambda name=name: self._openings[name],
                turns[i],
            )
            for k, (name, one) in enumerate(self._populations.items())
            for i in range(num_devices)
        ]
        for task in served.tasks:  # Their numbers follow those of the devices.
            self._devices += [
                noise_parties.Party(
                    number,
                    f"{len(self._devices) + number}",
                    task,
                    self._factories[served.name].selectors,
                    self._random,
                    self._send,
                    self._wake_later,
                )
                for number in range(len(task.noise_parties))
            ]
        for device in self._devices:
            self._wake_later(self._random.uniform(0, 5), device, "connect")

    def run(self) -> watch.Watch:
        """Runs it: a time in which things go wrong, then one in which they must go right.

        Returns:
          What happened in the first population.
        """
        self._run_until(FAULTY_SECONDS)
        self._faults = faults.NONE
        goals = {
            name: {task.name: seen.rounds_committed(task.name) + 1 for task in one.tasks}
            for (name, one), seen in zip(
                self._populations.items(), self.watches.values(), strict=True
            )
        }

        def is_reached(name: str) -> bool:
            seen, goal = self.watches[name], goals[name]
            return all(seen.rounds_committed(task) >= goal[task] for task in goal)

        # Each device trains for one population at a time, so that two need up to twice as long.
        seconds = PROGRESS_SECONDS * len(self._populations)
        self._run_until(FAULTY_SECONDS + seconds, lambda: all(map(is_reached, self._populations)))
        for name, seen in self.watches.items():
            if not is_reached(name):
                seen.no_progress(f"within {seconds} seconds")
        return self.watch

    def _run_until(self, end: float, is_over: Callable[[], bool] | None = None) -> None:
        queue = self._queue
        commits = self._num_commits
        while queue and queue[0][0] <= end:
            self.time, _, to, only, message = heapq.heappop(queue)
            if to:
                self._deliver(to, only, message)
            else:
                message()
            if is_over is not None and commits != self._num_commits:
                commits = self._num_commits
                if is_over():
                    return

    @property
    def _num_commits(self) -> int:
        return sum(seen.num_commits for seen in self.watches.values())

    def _population_of(self, address: str) -> str:
        """Returns the population of an actor or of a device's connection."""
        name = self._places.get(address) or roles.population_of(address)
        if name:
            return name
        device = int(address.partition(".")[0])
        last = len(self._populations) - 1  # Noise parties are numbered after all devices.
        return list(self._populations)[min(device // self._num_devices, last)]

    # Messages.

    # An entry of the queue: when, a number, to whom, the only actor that may get it (or
    # None), and the message; or, to nobody, what is to be called.

    def _put(self, seconds: float, to: str, only: object, message: object) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (self.time + seconds, self._serial, to, only, message))

    def _wake_later(
        self, seconds: float, device: devices.Device | noise_parties.Party, what: str
    ) -> None:
        self._put(seconds, "", None, lambda: device.wake(what, self._faults))

    def _send(self, sender: str, to: str, message: object, held: float = 0.0) -> None:
        population_name = self._population_of(sender)
        self.watches[population_name].sent(sender, message)
        if to == events.OBSERVER:
            if isinstance(message, events.SelectionOpened):
                self._openings[population_name] = message
            return
        wrong = self._faults
        draw = self._random.random
        chance = draw()
        if chance < wrong.lost:
            return
        seconds = held + _QUICKEST + (_SLOWEST - _QUICKEST) * draw()
        chance -= wrong.lost
        if chance < wrong.doubled:
            self._put(held + self._delay(), to, None, message)
        elif chance - wrong.doubled < wrong.late:
            seconds = held + self._delay()
        self._put(seconds, to, None, message)

    def _delay(self) -> float:
        # Of every order of magnitude, up to the longest.
        return self._faults.longest_delay * 10 ** -self._random.uniform(0, 3)

    def _deliver(self, to: str, only: object, message: object) -> None:
        member = self._actors.get(to)
        if member is None or (only is not None and only is not member):
            self._deliver_elsewhere(to, message)
            return
        until = self._stopped_until.get(to)
        if until is not None:
            if until > self.time:
                self._put(until - self.time, to, only, message)
                return
            del self._stopped_until[to]
        wrong = self._faults
        chance = self._random.random()
        if chance < wrong.killed:
            self._kill(to, message)
            return
        effects = member.step(self.time + self._skews[to], message)
        held = 0.0
        if chance - wrong.killed < wrong.stopped:
            # Stopped after the step; half of the time before its effects are out.
            held = wrong.longest_stop * self._random.random()
            self._stopped_until[to] = self.time + held
            self.watches[self._population_of(to)].seen["actors stopped"] += 1
            held *= self._random.randrange(2)
        self._carry_out(member, effects, held)

    def _deliver_elsewhere(self, to: str, message: object) -> None:
        name, dot, _ = to.partition(".")
        if dot:
            device = self._devices[int(name)]
            if device.address == to:
                device.receive(message)
        elif isinstance(message, (messages.Report, messages.SecureSumMessage)):
            late = messages.ReportRefused(message.device, message.attempt, messages.Refusal.LATE)
            self._send(to, message.device, late)

    # Actors.

    def _carry_out(self, member: actor.Actor, effects: list[actor.Effect], held: float) -> None:
        for effect in effects:
            kind = type(effect)
            if kind is actor.Send:
                self._send(member.address, effect.to, effect.message, held)
            elif kind is actor.After:
                self._put(held + effect.seconds, member.address, member, effect.message)
            elif kind is actor.Spawn:
                actors = self._factories[self._population_of(effect.address)]
                made = actors.build(effect.address, effect.role, self._random)
                self._parents[effect.address] = member.address
                self._start(made)
            else:
                self._stop(effect.address)

    def _start(self, member: actor.Actor) -> None:
        self._actors[member.address] = member
        skew = self._faults.skew
        self._skews[member.address] = self._random.uniform(-skew, skew) if skew else 0.0
        effects = member.start(self.time + self._skews[member.address])
        self._carry_out(member, effects, 0.0)

    def _forget(self, address: str) -> None:
        self._actors.pop(address, None)
        self._parents.pop(address, None)
        self._stopped_until.pop(address, None)

    def _stop(self, address: str) -> None:
        """Ends an actor, and the Aggregators below it."""
        self._forget(address)
        for child in [one for one, parent in self._parents.items() if parent == address]:
            if "/round/" in address:
                self._stop(child)

    def _kill(self, address: str, message: object) -> None:
        member = self._actors[address]
        moment = self._random.choice(("before", "between effects"))
        if moment == "between effects":
            effects = member.step(self.time + self._skews[address], message)
            self._carry_out(member, effects[: self._random.randint(0, len(effects))], 0.0)
        dead = [address]
        if self._random.random() < self._faults.killed_together:
            dead = list(self._actors)
        for one in dead:
            self._bury(one)

    def _bury(self, address: str) -> None:
        role = address.rpartition("/")[0].rpartition("/")[2] or address
        if address in self._places:
            role = address.partition("/")[0]
        self.watches[self._population_of(address)].seen[f"killed: {role}"] += 1
        parent = self._parents.get(address)
        self._forget(address)
        if self._random.random() < self._faults.noticed:
            told = (parent,)
            if parent in self._places:
                told = self._factories[self._places[parent]].selectors
            for one in told:
                if one is not None:
                    self._put(_NOTICE_SECONDS, one, None, messages.Lost(address))
        if address in self._places:
            # A supervisor starts it again, with nothing remembered; its connections are lost.
            self._put(_RESTART_SECONDS, "", None, lambda: self._restart(address))
        for device in self._devices:
            if device.selector == address and not device.reports_to:
                device.disconnect(self._random.uniform(0, _RESTART_SECONDS))

    def _restart(self, address: str) -> None:
        actors = self._factories[self._places[address]]
        if address == actors.store_address:
            self._start(actors.store_actor(self._store))
        else:
            self._start(actors.selector(address, self._random))
