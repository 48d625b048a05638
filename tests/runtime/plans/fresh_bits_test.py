"""Whether a graph reads the bits of the operating system, as a server finds it out."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tff_dpftrl.execution import entropy, graph_function
from tff_dpftrl.private_round import seeds
from tff_dpftrl.runtime.plans import fresh_bits


def _graph(function):
    return graph_function.GraphFunction.trace(function, []).graph


def _read():
    return [seeds.root_seed_from_os()]


def test_reads_are_found_in_a_graph_and_in_its_functions():
    inner = tf.function(seeds.root_seed_from_os)
    assert fresh_bits.are_read(_graph(_read))
    assert fresh_bits.are_read(_graph(lambda: [inner(4)]))


@pytest.mark.parametrize("text", ["TextLineDataset", "TextLineDataset /dev/urandom"])
def test_a_name_alone_is_no_read(text):
    graph = _graph(lambda: [tf.strings.length(tf.constant(text, name="TextLineDataset"))])
    assert b"TextLineDataset" in graph
    assert not fresh_bits.are_read(graph)


def test_bits_of_another_file_are_not_fresh():
    graph = tf.compat.v1.GraphDef.FromString(_graph(_read))
    entropy.Repeated().read_instead(graph)
    assert not fresh_bits.are_read(graph.SerializeToString())


@pytest.mark.parametrize("content", [b"", b"TextLineDataset", b"\xff"])
def test_what_is_no_graph_reads_nothing(content):
    assert not fresh_bits.are_read(content)
