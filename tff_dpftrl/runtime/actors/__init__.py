"""The server as actors: plain state machines that make rounds, without any engine code.

Coordinator, Selectors, Master Aggregators and Aggregators (Bonawitz et al. 2019, section 4) are
plain classes; merging Aggregators stand between a Master Aggregator and many Aggregators. A message
goes in, effects come out:

    effects = actor.start(now)           # once
    effects = actor.step(now, message)   # for every message, one at a time

Messages are frozen dataclasses (`messages`, and `events` for the observer). Effects are `Send`,
`After`, `Spawn` and `Stop` (`actor`). An actor reads no clock, uses no randomness but the given
source, and opens no connection. So a deterministic simulator (`verification.schedules`) and real
engines (asyncio in one process, Ray on many machines) run the same classes. An engine must
guarantee:

- One step at a time for each actor; effects are carried out after the step. An actor whose step
  raises, or whose process dies, is lost with its state.
- `Send(to, message)`: deliver the message once, several times, early, late, or never: every wait
  of an actor has a time-out. Addresses of devices are names of connections; they mean nothing when
  the connection is closed, and are never written.
- `After(seconds, message)`: deliver the message to the actor itself, unless it is gone.
- `Spawn(address, role)`: build the actor of the role (`factory.ActorFactory.build`) where there is
  room, and start it. Roles are data, so that they can travel.
- `Stop(address)`: end the actor, and those that it has spawned (a Coordinator's attempt goes on
  to its end). The engine itself answers a report, or a message of a secure sum,
  for an actor that is gone with `ReportRefused(..., Refusal.LATE)`. It answers devices that wait,
  in a secure sum, for an actor that is gone in the same way. It sends `ComeBack` to devices that
  are forwarded to an attempt that is gone, since no actor knows of them.
- `Lost(address)` may be sent to the actor that spawned a lost one (for a Coordinator: to the
  Selectors), and the Aggregators below a lost actor may be ended. Both save time; the
  time-outs do the same later.
- `DeviceGone(device)`: send it to the device's Selector, and to the Aggregator that waits for its
  report.

An engine starts with a `StoreActor`, and a Selector for each process that devices connect to. The
Selectors find that no Coordinator leads, and each spawns one; the lease decides which one stays.
The death of a Coordinator is detected and repaired in the same way.

The simulator checks these laws:

- **Fencing**: a Coordinator stops when its lease has ended by its own clock, counted from the time
  of its request. Selectors follow the highest epoch that they have seen. A commit names its epoch,
  and the store refuses all but the latest.
- **Noise, commit, release**: the task's server step adds the noise, and the Master Aggregator sends
  the result to the store and to nobody else. All that leaves (the next round's model, metrics) is
  read from a commit that the store has confirmed, and is never computed again: other calls of the
  step have other noise. An abandoned attempt has released nothing.
- **Loss**: with an Aggregator, its devices are lost, with a merging Aggregator those of all
  Aggregators below it; with a Master Aggregator, the attempt; with a
  Selector, its connected devices; with a Coordinator, nothing that is committed.
"""
