"""Memory of a round does not grow with its clients."""

import subprocess
import sys

import pytest

# In a process of its own: the peak of one that ran other tests would hide what grows here.
_PROGRAM = """
import resource
import numpy as np
import tensorflow as tf
from tests.execution import small_processes
from tff_dpftrl.execution import client_part, compiled_process

runner = client_part.ThreadedClients(2)
process = small_processes.build(lambda x: tf.fill([{size}], x), np.float32)
compiled = compiled_process.compile_process(process, clients=runner)
for num_clients in (40, 400):
    total = compiled.next(0.0, num_clients * [1.0])[1]
    assert np.all(total == num_clients)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
_SIZE = 200_000


@pytest.mark.slow
def test_four_hundred_clients_need_no_more_than_forty():
    completed = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(size=_SIZE)], check=True, stdout=subprocess.PIPE
    )
    peak_of_40, peak_of_400 = map(int, completed.stdout.split())
    # In KiB. Results of the 360 clients that are more would be 275 MiB; the allocator may come to
    # hold a few of the tensors in flight.
    result = 4 * _SIZE // 1024
    assert peak_of_400 - peak_of_40 < 20 * result
