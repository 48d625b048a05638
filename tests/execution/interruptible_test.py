"""Calls that another thread ends, and those beside them that go on."""

import threading

import pytest
import tensorflow as tf

from tff_dpftrl.execution import client_part, interruptible


def _wait(is_waiting):
    return [tf.while_loop(lambda i: i > 0, lambda i: [i + 0], [is_waiting])[0]]


def test_a_call_returns_what_the_function_does():
    function = client_part.traced(lambda a, b: [a + b, a], [tf.TensorSpec([], tf.float32)] * 2)
    total, one = interruptible.InterruptibleCall().run(
        function, [tf.constant(1.0), tf.constant(2.0)]
    )
    assert total.numpy() == 3.0 and one.numpy() == 1.0


def test_an_interrupt_ends_one_call_and_no_other():
    function = client_part.traced(_wait, [tf.TensorSpec([], tf.int32)])
    calls = [interruptible.InterruptibleCall() for _ in range(2)]
    ended = []
    threads = []
    for index, call in enumerate(calls):

        def run(index=index, call=call):
            try:
                call.run(function, [tf.constant(1)])
            except tf.errors.OpError:
                ended.append(index)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
    calls[1].interrupt()
    threads[1].join()
    assert ended == [1] and threads[0].is_alive() and not calls[0].is_interrupted
    calls[0].interrupt()
    threads[0].join()
    assert ended == [1, 0]


def test_an_interrupt_before_the_call_ends_it_too():
    function = client_part.traced(_wait, [tf.TensorSpec([], tf.int32)])
    call = interruptible.InterruptibleCall()
    call.interrupt()
    with pytest.raises(tf.errors.OpError):
        call.run(function, [tf.constant(1)])
