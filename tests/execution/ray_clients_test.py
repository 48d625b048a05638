"""Ray's workers compute what one process computes, whoever is killed on the way."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tree

from tests.execution import plain_part
from tff_dpftrl import aggregators
from tff_dpftrl.execution import client_part, compiled_process
from tff_dpftrl.mechanisms import blt

_NUM_CLIENTS = 30  # Fifteen chunks.


@pytest.fixture(scope="module")
def ray():
    """A Ray of this test's own, with four CPUs, to which `RayClients` are guests."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: run `make test-distributed`.")
    ray.init(
        "local",
        num_cpus=4,
        object_store_memory=2**28,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def functions():
    return client_part.ClientFunctions(plain_part.build())


@pytest.fixture(scope="module")
def expected(functions):
    threads = client_part.ThreadedClients(2)
    yield threads.sum(functions, _clients(), plain_part.broadcast())
    threads.close()


def _process():
    def model_fn():
        spec = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None, 1], tf.float32))
        return tff.learning.models.from_keras_model(
            tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))]),
            loss=tf.keras.losses.MeanSquaredError(),
            input_spec=spec,
        )

    return tff.learning.algorithms.build_unweighted_fed_avg(
        model_fn,
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
        model_aggregator=aggregators.build_dp_ftrl_aggregator(
            blt.Blt((0.9, 0.5), (0.3, 0.2)),
            clip_norm=1.0,
            noise_multiplier=0.5,
            clients_per_round=9,
            deterministic_seed=7,
        ),
    )


@contextlib.contextmanager
def _workers(num_workers, **kwargs):
    from tff_dpftrl.execution import ray_clients

    with ray_clients.RayClients(num_workers, **kwargs) as clients:
        yield clients


@pytest.fixture(scope="module")
def two_workers(ray):
    with _workers(2) as clients:
        yield clients


def _clients(disturb=lambda index: None):
    def make_values(index, value):
        disturb(index)
        return value

    return [
        lambda i=i, value=value: make_values(i, value)
        for i, value in enumerate(plain_part.values(_NUM_CLIENTS))
    ]


def _assert_same_bits(total, expected):
    assert [one.numpy().tobytes() for one in total] == [one.numpy().tobytes() for one in expected]


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until_gone(pids) -> None:
    deadline = time.monotonic() + 180
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if _is_running(pid)]


def test_the_order_of_the_sum_matters_here(functions, expected):
    backwards = client_part.ThreadedClients(2)
    total = backwards.sum(functions, _clients()[::-1], plain_part.broadcast())
    backwards.close()
    assert total[0].numpy().tobytes() != expected[0].numpy().tobytes()


def test_number_of_workers_changes_no_bit(functions, expected, two_workers):
    for _ in range(2):
        total = two_workers.sum(functions, _clients(), plain_part.broadcast())
        _assert_same_bits(total, expected)
    with _workers(1) as one_worker:
        total = one_worker.sum(functions, _clients(), plain_part.broadcast())
        _assert_same_bits(total, expected)


def _dataset(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(1 + seed % 7, 3)).astype(np.float32)
    y = x @ np.ones([3, 1], np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(7, seed=seed).batch(2)


def test_rounds_with_noise_are_those_of_one_process(two_workers):
    process = _process()
    states = []
    for clients in (client_part.ThreadedClients(2), two_workers):
        compiled = compiled_process.compile_process(process, clients=clients)
        state = process.initialize()
        for round_index in range(3):
            state = compiled.next(state, [_dataset(9 * round_index + i) for i in range(9)]).state
        states.append(state)
    tree.map_structure(np.testing.assert_array_equal, *states)


def test_no_clients_sum_to_zero(functions, two_workers):
    total = two_workers.sum(functions, [], plain_part.broadcast())
    _assert_same_bits(total, functions.zero())


def test_one_runner_serves_several_processes(functions, expected, two_workers):
    other = client_part.ClientFunctions(plain_part.build(scale=2.0))
    doubled = two_workers.sum(other, _clients(), plain_part.broadcast())
    _assert_same_bits(two_workers.sum(functions, _clients(), plain_part.broadcast()), expected)
    assert doubled[0].numpy()[0] == 2 * expected[0].numpy()[0]  # A power of two is exact.


def test_a_killed_worker_changes_no_bit_and_is_replaced(functions, expected, two_workers):
    killed = []

    def disturb(index):
        if index == 13 and not killed:
            killed.append(two_workers.wait_until_ready()[0])
            os.kill(killed[0], signal.SIGKILL)

    with pytest.warns(UserWarning, match="A Ray worker was lost"):
        total = two_workers.sum(functions, _clients(disturb), plain_part.broadcast())
    _assert_same_bits(total, expected)
    pids = two_workers.wait_until_ready()
    assert len(pids) == 2 and killed[0] not in pids


def test_all_workers_killed_changes_no_bit(functions, expected, two_workers):
    killed = []

    def disturb(index):
        if index == 13 and not killed:
            killed.extend(two_workers.wait_until_ready())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    with pytest.warns(UserWarning, match="A Ray worker was lost"):
        total = two_workers.sum(functions, _clients(disturb), plain_part.broadcast())
    _assert_same_bits(total, expected)
    assert not set(killed) & set(two_workers.wait_until_ready())


def test_a_chunk_that_no_worker_survives_ends_the_round(
    functions, expected, two_workers, monkeypatch
):
    from tff_dpftrl.execution import ray_clients

    monkeypatch.setattr(ray_clients, "_MAX_LOSSES", 1)

    def disturb(index):
        if index == 13:
            for pid in two_workers.wait_until_ready():
                os.kill(pid, signal.SIGKILL)

    with (
        pytest.warns(UserWarning, match="A Ray worker was lost"),
        pytest.raises(client_part.NoWorkersError, match="2 times .* or resume the run"),
    ):
        two_workers.sum(functions, _clients(disturb), plain_part.broadcast())
    _assert_same_bits(two_workers.sum(functions, _clients(), plain_part.broadcast()), expected)


def test_a_worker_that_hangs_counts_as_lost(functions, expected, ray):
    stopped = []
    with _workers(2, chunk_timeout_seconds=3.0) as clients:

        def disturb(index):
            if index == 13 and not stopped:
                stopped.append(clients.wait_until_ready()[0])
                os.kill(stopped[0], signal.SIGSTOP)

        with pytest.warns(UserWarning, match="more than 3.0 s"):
            total = clients.sum(functions, _clients(disturb), plain_part.broadcast())
    _assert_same_bits(total, expected)
    _wait_until_gone(stopped)


def test_a_failing_client_is_an_error_and_no_loss(functions, expected, two_workers):
    pids = two_workers.wait_until_ready()
    clients = _clients()
    for bad in (9, 25):
        clients[bad] = lambda: [tf.constant([-1.0, 0.0, 0.0])]
    with pytest.raises(tf.errors.InvalidArgumentError, match=plain_part.NEGATIVE):
        two_workers.sum(functions, clients, plain_part.broadcast())
    _assert_same_bits(two_workers.sum(functions, _clients(), plain_part.broadcast()), expected)
    assert two_workers.wait_until_ready() == pids


def test_data_that_cannot_leave_is_refused(functions, two_workers):
    dataset = tf.data.Dataset.range(3).map(lambda _: tf.random.uniform([]))
    clients = _clients()
    clients[4] = lambda: [tf.data.experimental.to_variant(dataset)]
    with pytest.raises(ValueError, match="client 4 of the round cannot be sent"):
        two_workers.sum(functions, clients, plain_part.broadcast())


def test_a_round_begins_with_the_workers_that_there_are(functions, expected, ray):
    with _workers(64) as clients:
        _assert_same_bits(clients.sum(functions, _clients(), plain_part.broadcast()), expected)


def test_a_cluster_without_a_free_cpu_ends_the_round(functions, two_workers):
    two_workers.wait_until_ready()
    with _workers(2) as others:
        others.wait_until_ready()
        with (
            _workers(2, start_timeout_seconds=3.0) as clients,
            pytest.raises(client_part.NoWorkersError, match="free CPU for each of 2 workers"),
        ):
            clients.sum(functions, _clients(), plain_part.broadcast())


def test_closed_workers_are_gone_and_their_host_is_not(functions, ray):
    with _workers(1) as clients:
        pids = clients.wait_until_ready()
    _wait_until_gone(pids)
    clients.close()
    with pytest.raises(ValueError, match="have been closed"):
        clients.sum(functions, _clients(), plain_part.broadcast())
    assert ray.is_initialized()


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"num_workers": 0}, "num_workers must be"),
        ({"threads_per_worker": 0}, "threads_per_worker must be"),
        ({"address": "127.0.0.1:1"}, "connected to Ray already"),
    ],
)
def test_bad_arguments_are_refused(ray, kwargs, message):
    from tff_dpftrl.execution import ray_clients

    with pytest.raises(ValueError, match=message):
        ray_clients.RayClients(**kwargs)


_GUEST = textwrap.dedent("""
    import sys
    from tests.execution import plain_part
    from tff_dpftrl import execution
    from tff_dpftrl.execution import client_part
    functions = client_part.ClientFunctions(plain_part.build())
    clients = [lambda value=value: value for value in plain_part.values(int(sys.argv[2]))]
    with execution.RayClients(1, address=sys.argv[1]) as workers:
        (total,) = workers.sum(functions, clients, plain_part.broadcast())
    print(total.numpy().tobytes().hex())
""")


def test_a_guest_leaves_the_cluster_as_it_was(functions, expected, two_workers, ray):
    address = ray.get_runtime_context().gcs_address
    # Ray would look for a cluster on loopback at this machine's other address.
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    guest = subprocess.run(
        [sys.executable, "-c", _GUEST, address, str(_NUM_CLIENTS)],
        capture_output=True,
        text=True,
        env=os.environ | loopback | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert guest.stdout == expected[0].numpy().tobytes().hex() + "\n", guest.stderr
    _assert_same_bits(two_workers.sum(functions, _clients(), plain_part.broadcast()), expected)


def test_an_address_where_nobody_answers_is_refused_at_once(ray):
    guest = subprocess.run(
        [sys.executable, "-c", _GUEST, "127.0.0.1:9", "1"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "ConnectionError: No Ray cluster answers at '127.0.0.1:9'" in guest.stderr


# Prints what it has started and where that listens.
_EMBEDDED = textwrap.dedent("""
    import signal, sys, time
    import psutil
    from tff_dpftrl import execution
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    clients = execution.RayClients(1)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    worker, = clients.wait_until_ready()
    started = psutil.Process().children(recursive=True)
    assert worker in [process.pid for process in started]
    hosts = set()
    for process in [psutil.Process(), *started]:
        hosts |= {c.laddr.ip for c in process.connections("tcp") if c.status == "LISTEN"}
    print(*[process.pid for process in started])
    print(*sorted(hosts), flush=True)
    if sys.argv[1] == "close":
        clients.close()
    time.sleep(600)
""")


# After a SIGKILL two helpers of Ray's, which compute nothing, take a minute to notice.
@pytest.mark.parametrize("how", ["close", pytest.param("kill", marks=pytest.mark.slow)])
def test_the_embedded_ray_is_on_loopback_and_ends_with_its_program(how):
    pytest.importorskip("ray", reason="Ray is not installed: run `make test-distributed`.")
    program = subprocess.Popen(
        [sys.executable, "-c", _EMBEDDED, how],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        pids = [int(pid) for pid in program.stdout.readline().split()]
        hosts = set(program.stdout.readline().split())
        if how == "kill":
            program.kill()
        _wait_until_gone(pids)
    finally:
        program.kill()
        program.wait()
    assert len(pids) > 3
    assert hosts <= {"127.0.0.1", "::ffff:127.0.0.1"} and hosts


@pytest.mark.slow
def test_without_ray_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['ray'] = None; from tff_dpftrl import execution; "
        "execution.RayClients"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        "ModuleNotFoundError: Ray is not installed: pip install 'tff_dpftrl[distributed]'"
        in done.stderr
    )
