"""Secure noise in graphs that came from elsewhere: this process draws it."""

from __future__ import annotations

import tensorflow as tf

from tff_dpftrl.execution import graph_function
from tff_dpftrl.private_round import secure_calls


def answer(graph_def: tf.compat.v1.GraphDef) -> None:
    """Makes a graph draw its secure noise in this process.

    Functions in it that stand for draws are replaced by functions that call Python, in place. No
    other process can run it then.
    """
    library = graph_def.library
    places = {}
    for function in library.function:
        for node in function.node_def:
            if (size := secure_calls.size_of(node.name)) is not None:
                places[function.signature.name] = secure_calls.answered(*size)
    for concrete in {id(one): one for one in places.values()}.values():
        library.function.append(concrete.function_def)
        library.function.extend(concrete.graph.as_graph_def().library.function)
    for node in graph_function.nodes_of(graph_def):
        for function in graph_function.called_by(node):
            if function.name in places:
                function.name = places[function.name].function_def.signature.name
