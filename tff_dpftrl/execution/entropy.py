"""Fresh bits that a graph reads, held fixed for tests and audits.

A round of this package reads bits of the operating system whenever it is executed, so that no two
executions have the same noise. An audit compares two executions that differ by one client: it has
the graphs read a file of its own instead. Nothing that trains or serves takes one.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import weakref

import tensorflow as tf

from tff_dpftrl.execution import graph_function
from tff_dpftrl.private_round import seeds

OPS = frozenset(
    "TextLineDataset BatchDatasetV2 TakeDataset DatasetToSingleElement ReduceJoin".split()
)
"""Operations of `seeds.root_seed_from_os`, beside those of every graph."""

_READ = "TextLineDataset"
_LINE_BYTES = 256  # Twice what the longest seed is made of.


class Repeated:
    """Bits that stay the same until they are renewed."""

    def __init__(self):
        """Draws the first bits."""
        descriptor, self.path = tempfile.mkstemp(prefix="repeated_entropy_")
        os.close(descriptor)
        weakref.finalize(self, os.unlink, self.path)
        self.renew()

    def renew(self) -> None:
        """Draws other bits."""
        line = secrets.token_bytes(_LINE_BYTES).translate(None, b"\r\n")
        with open(self.path, "r+b") as file:  # To empty the file first takes twenty times as long.
            file.write(line + b"\n")

    def read_instead(self, graph_def: tf.compat.v1.GraphDef) -> None:
        """Makes a graph read these bits where it reads those of the operating system, in place."""
        for node in graph_function.nodes_of(graph_def):
            if _value(node) == seeds.SOURCE:
                node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([self.path]))


def is_of_the_system(graph_def: tf.compat.v1.GraphDef) -> bool:
    """Checks that a graph reads no file but the operating system's generator."""
    for nodes in (graph_def.node, *(one.node_def for one in graph_def.library.function)):
        values = {node.name: _value(node) for node in nodes}
        for node in nodes:
            if node.op == _READ:
                name = node.input[0].partition(":")[0]
                if values.get(name) != seeds.SOURCE:
                    return False
    return True


def _value(node: tf.compat.v1.NodeDef) -> str | None:
    """Returns the one string of a constant, None for any other node."""
    if node.op != "Const" or node.attr["dtype"].type != tf.string.as_datatype_enum:
        return None
    values = tf.make_ndarray(node.attr["value"].tensor).ravel()
    return values[0].decode(errors="replace") if len(values) == 1 else None
