"""Runs the server's actors through schedules that no test machine would ever show.

A schedule is a seed: it decides which messages are late, lost or doubled, when devices come
and go, which actor dies at which message (before it, after it, or between two of its effects),
which one is stopped past its lease and comes back, and how clocks differ. The actors are the
real ones (`runtime.actors`); the store is one that lives in memory and keeps the same laws
(`runtime.store`, whose tests are the same for both); a task sums names instead of numbers,
so that every result tells which devices and which noise are in it. It can do so securely: then
the names are in vectors, under the masks of `secure_sums`.

`simulation.Simulation` runs one schedule, `watch.Watch` sees everything that is committed or
leaves the server, and notes what breaks a law.
"""
