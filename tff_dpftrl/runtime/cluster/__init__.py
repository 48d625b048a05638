"""The server on many machines: the actors of `runtime.actors`, on hosts that Ray runs.

A host is a process in which an `Engine` runs some of the actors: a Selector with the gRPC
service of its devices (`selector_host`), the Coordinator (`coordinator_host`), or Master
Aggregators and Aggregators (`worker_host`). Hosts send each other the actors' messages (`mail`),
encrypted (`sealing`). The address of an actor determines its host (`placement`). Only
`ray_hosts` depends on Ray.

Anyone who reaches the ports of a Ray cluster can run code on it: keep it in a separate network.
Messages are encrypted even so, because Ray writes them to shared memory and to disk.
"""
