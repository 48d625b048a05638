"""The server as actors: who does what in a round, without a line of engine code.

Coordinator, Selectors, Master Aggregators and Aggregators (Bonawitz et al. 2019, section 4)
are plain classes. A message goes in, effects come out:

    effects = actor.start(now)           # once
    effects = actor.step(now, message)   # for every message, one at a time

Messages are frozen dataclasses (`messages`), effects are `Send`, `After`, `Spawn` and `Stop`
(`actor`). An actor reads no clock, draws from no randomness but what it was given, and opens
no connection; a deterministic simulator (`verification.schedules`) and real engines (asyncio in
one process, Ray on many machines) run the same classes. What an engine owes them:

- One step at a time for each actor; effects are carried out after the step. An actor whose
  step raises, or whose process dies, is gone with all that it knew.
- `Send(to, message)`: deliver at most once or several times, early or late, or never: every
  wait of an actor has an end. The addresses of devices are names of connections; they mean
  nothing when the connection is closed, and are never written.
- `After(seconds, message)`: deliver to the actor itself; forgotten when it is gone.
- `Spawn(address, role)`: build the actor of the role (`factory.ActorFactory.build`) where there is
  room, and start it. Roles are data, so that they can travel.
- `Stop(address)`: end it. A report, or a message of a secure sum, that comes for an actor which
  is not there any more is answered by the engine with `ReportRefused(..., Refusal.LATE)`; so
  are devices that wait, in a secure sum, for an answer of one that is gone. Devices that are
  forwarded to an attempt that is gone are told to come back: nobody else knows of them.
- `Lost(address)` may be sent to whoever spawned an actor that is gone (for a Coordinator: to
  the Selectors), and the Aggregators of a Master Aggregator that is gone may be ended. It saves
  time; the time-outs would find out as well.
- `DeviceGone(device)`: to the device's Selector, and the Aggregator that it was to report to.

Start it with a `StoreActor` and a Selector for each process that devices connect to. The
Selectors find that nobody leads, and each spawns a Coordinator; the lease decides which one
stays. Death of a Coordinator is found and mended in the same way.

The laws, which the simulator checks:

- **Fencing**: a Coordinator stops when its lease has ended by its own clock, counted from
  when it asked. Selectors follow the highest epoch they have heard of. A commit names its
  epoch and the store refuses all but the latest.
- **Noise, commit, release**: the Master Aggregator has noise drawn by the task's server step
  and sends the result to the store and to nobody else. What leaves (the next round's model,
  metrics) is taken from a commit that the store has confirmed. An attempt that is abandoned
  has released nothing, so that the same round, with the same noise, may meet another cohort.
- **Loss**: with an Aggregator, its devices are lost; with a Master Aggregator, the attempt;
  with a Selector, who is connected to it; with a Coordinator, nothing that is committed.
"""
