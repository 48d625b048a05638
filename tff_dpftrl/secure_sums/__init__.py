"""Secure aggregation: sums over devices of which the server sees only the sum, as state machines.

The protocol of Bonawitz et al. 2017 ("Practical Secure Aggregation"), and the neighbour graph of
Bell et al. 2020 for large groups. Devices and server take messages and return messages: no input
or output, no TensorFlow. They run in tests, in this package's runtime and in other servers.

- `vectors.Segment`, `parameters.Parameters`: layout of the summed vectors, and the devices'
  demands on the sum under a `parameters.ThreatModel`. Devices must have them from a trusted source.
- `device.Participant`: a device in one session. `advertise()` makes its first message, `answer`
  the next one from each of the server's; it refuses by raising one of `refusals`.
- `group.Group`: the server. `receive` takes a message, `drop` removes a device, and `advance` ends
  a phase with the devices that have answered. The caller has the clock and calls `advance`. At
  the end, `total()` is the sum of the vectors of `survivors`.
- `noise_party.NoiseParty`: a party without data that adds noise to the sum. Only who knows the
  noise, such as the party, can subtract it. `Parameters.noise_parties` names its key, and devices
  refuse a group without it.
- `neighbours.choose`: the number of neighbours of a device in a group of thousands.

Messages are protocol buffers (`secure_sum.proto`): `SerializeToString()` makes bytes of them.

  >>> import numpy as np
  >>> from tff_dpftrl.secure_sums import device, group, parameters, vectors
  >>> layout = (vectors.Segment(size=2, modulus=2**20),)
  >>> demanded = parameters.Parameters(
  ...     layout, parameters.ThreatModel.HONEST_BUT_CURIOUS, least_devices=3)
  >>> session = parameters.new_session()  # The server sends it to all devices.
  >>> devices = [
  ...     device.Participant(demanded, session, [np.array([1, value], np.uint32)])
  ...     for value in (10, 20, 30)]
  >>> server = group.Group(demanded, session)
  >>> for name, participant in enumerate(devices):
  ...     server.receive(name, participant.advertise())
  >>> while messages := server.advance():
  ...     for name, message in messages.items():
  ...         server.receive(name, devices[name].answer(message))
  >>> server.total()
  [array([ 3, 60], dtype=uint32)]

A caller has three errors to expect. `refusals.ProtocolRefusedError` on a device: it takes no
further part, and the server should `drop` it. `group.MessageRefusedError`: the group goes on, as
long as enough devices are left. `group.GroupLostError`: there is no sum.
`docs/explanation/secure_aggregation.md` describes the protection and its limits.
"""
