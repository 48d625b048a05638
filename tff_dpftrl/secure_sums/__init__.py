"""Sums over devices of which the server sees nothing but the sum, as state machines.

The protocol of Bonawitz et al. 2017 ("Practical Secure Aggregation"), and the neighbour graph of
Bell et al. 2020 for large groups. Devices and server are fed with messages and return messages:
no input or output, no TensorFlow, so that they run in tests, in this package's runtime and in
other people's servers.
"""
