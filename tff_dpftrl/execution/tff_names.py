"""Names of TFF's language that this package uses: types, computations, building blocks.

In TFF 0.87 they are TFF's own. At TFF's head most of them are in the package `federated_language`.
So everything but `tff.learning`, `tff.aggregators`, `tff.templates` and `tff.simulation` is
imported from here. `ARCHITECTURE.md` says what else a port would change.
"""

from __future__ import annotations

import tensorflow_federated as tff
from tensorflow_federated import (  # noqa: F401 (for other modules)
    CLIENTS,
    SERVER,
    Computation,
    FederatedType,
    SequenceType,
    StructType,
    TensorType,
    Type,
    Value,
    federated_broadcast,
    federated_computation,
    federated_eval,
    federated_map,
    federated_secure_sum,
    federated_sum,
    federated_value,
    federated_zip,
    to_type,
)

# Structures without names of their own.
Struct = tff.structure.Struct
from_container = tff.structure.from_container
iter_elements = tff.structure.iter_elements
to_odict_or_tuple = tff.structure.to_odict_or_tuple

# TensorFlow inside of TFF.
tensorflow_computation = tff.tensorflow.computation
is_structure_of_tensors = tff.types.is_structure_of_tensors
tensorflow_to_type = tff.types.tensorflow_to_type
type_to_py_container = tff.types.type_to_py_container
type_to_tf_tensor_specs = tff.types.type_to_tf_tensor_specs

# The parts that a computation is made of; `StructBlock` is `tff.framework.Struct`.
Block = tff.framework.Block
Call = tff.framework.Call
CompiledComputation = tff.framework.CompiledComputation
ComputationBuildingBlock = tff.framework.ComputationBuildingBlock
ConcreteComputation = tff.framework.ConcreteComputation
Intrinsic = tff.framework.Intrinsic
Lambda = tff.framework.Lambda
PlacementLiteral = tff.framework.PlacementLiteral
Reference = tff.framework.Reference
Selection = tff.framework.Selection
StructBlock = tff.framework.Struct

# Where computations run, and what they are taken apart into.
SyncContext = tff.framework.SyncContext
SyncExecutionContext = tff.framework.SyncExecutionContext
get_context_stack = tff.framework.get_context_stack
create_sync_local_cpp_execution_context = (
    tff.backends.native.create_sync_local_cpp_execution_context
)
create_sync_test_cpp_execution_context = tff.backends.test.create_sync_test_cpp_execution_context
MapReduceForm = tff.backends.mapreduce.MapReduceForm
federated_secure_modular_sum = tff.backends.mapreduce.federated_secure_modular_sum
get_map_reduce_form_for_computation = tff.backends.mapreduce.get_map_reduce_form_for_computation
get_state_initialization_computation = tff.backends.mapreduce.get_state_initialization_computation
