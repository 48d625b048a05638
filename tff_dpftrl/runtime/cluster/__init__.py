"""The server on many machines: the actors of `runtime.actors`, on hosts that Ray runs.

A host is a process in which an `Engine` runs some of the actors: a Selector with the gRPC
service of its devices (`selector_host`), the Coordinator (`coordinator_host`), or Master
Aggregators and Aggregators (`worker_host`).
Hosts carry the actors' messages to each other (`mail`), sealed (`sealing`); where an actor is
follows from its address (`placement`). Only `ray_hosts` knows of Ray.

Whoever reaches the ports of a Ray cluster can run code on it: it has to be in a network of
its own. Messages are sealed all the same, since Ray writes them to shared memory and to disk.
"""
