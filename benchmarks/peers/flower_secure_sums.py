"""One group's sum by Flower's SecAgg+, for `benchmarks/secure_sums.py` (see README.md).

    python flower_secure_sums.py --devices 100 --parameters 100000 --drop-outs 10 \
        --neighbours 99 --threshold 51

Flower's own `SecAggPlusWorkflow` and `secaggplus_mod`, in this process: instead of the network,
messages are handed from one to the other. Devices that drop out have sent their shares, and no
masked vector. The sum is compared with the plain one. One line of JSON tells the processor
seconds of the server, and those of a device and the bytes of its messages, by stage: means over
the devices that are there.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import time
import types

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import flwr
import flwr.compat.common.recorddict_compat as compat
import numpy as np
from flwr.app import Message
from flwr.client.mod import secaggplus_mod
from flwr.common import (
    Code,
    ConfigRecord,
    Context,
    FitIns,
    FitRes,
    RecordDict,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.serde import recorddict_to_proto
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.supercore.task_identity import TaskIdentity

_CLIPPING_RANGE = 8.0
_QUANTIZATION_RANGE = 2**22


class _Group:
    """All devices, and the network between them and the server: Flower's `Grid`."""

    def __init__(self, num_devices: int, vectors: np.ndarray, num_dropped: int):
        self._contexts = {
            node_id: Context(1, node_id, {}, RecordDict(), {})
            for node_id in range(1, num_devices + 1)
        }
        self._vectors = vectors
        self._dropped = set(range(1, num_dropped + 1))
        # Of all devices, by stage.
        self.calls = collections.Counter()
        self.seconds = collections.Counter()
        self.bytes_up = collections.Counter()
        self.bytes_down = collections.Counter()
        self.harness_seconds = 0.0

    def _train(self, message, context):
        updated = ndarrays_to_parameters([self._vectors[context.node_id - 1]])
        result = FitRes(Status(Code.OK, ""), updated, 1, {})
        return types.SimpleNamespace(content=compat.fitres_to_recorddict(result, False))

    def send_and_receive(self, messages, *, timeout=None):
        """Hands each message to its device and returns the answers."""
        del timeout
        begin_all, replies = time.process_time(), []
        for message in messages:
            node_id = message.metadata.dst_node_id
            stage = message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]
            if node_id in self._dropped and stage in (Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK):
                continue
            self.bytes_down[stage] += recorddict_to_proto(message.content).ByteSize()
            # Messages of the workflow share their content; devices get a copy of their own.
            content = RecordDict(dict(message.content))
            configs = ConfigRecord(dict(message.content.config_records[RECORD_KEY_CONFIGS]))
            content.config_records[RECORD_KEY_CONFIGS] = configs
            message = Message(content, node_id, message.metadata.message_type)
            begin = time.process_time()
            reply = secaggplus_mod(message, self._contexts[node_id], self._train)
            spent = time.process_time() - begin
            self.seconds[stage] += spent
            self.calls[stage] += 1
            self.bytes_up[stage] += recorddict_to_proto(reply.content).ByteSize()
            replies.append(reply)
        self.harness_seconds += time.process_time() - begin_all
        return replies


class _Strategy:
    """Takes all devices, and keeps the result."""

    def __init__(self, num_devices: int):
        self._proxies = [types.SimpleNamespace(node_id=i + 1) for i in range(num_devices)]
        self.mean = None

    def configure_fit(self, server_round, parameters, client_manager):
        """Sends everybody nothing to train with."""
        del server_round, parameters, client_manager
        nothing = ndarrays_to_parameters([])
        return [(proxy, FitIns(nothing, {})) for proxy in self._proxies]

    def aggregate_fit(self, server_round, results, failures):
        """Keeps what the workflow computed."""
        del server_round, failures
        (self.mean,) = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}


def main() -> None:
    """Makes one sum and prints what it took."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--drop-outs", type=int, required=True, help="how many devices")
    parser.add_argument("--neighbours", type=int, required=True)
    parser.add_argument("--threshold", type=int, required=True)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    rng = np.random.default_rng(0)
    vectors = rng.uniform(-1, 1, (given.devices, given.parameters)).astype(np.float32)
    group = _Group(given.devices, vectors, given.drop_outs)
    strategy = _Strategy(given.devices)
    context = LegacyContext(Context(1, 0, {}, RecordDict(), {}), strategy=strategy)
    context.client_manager = types.SimpleNamespace(num_available=lambda: given.devices)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(
        ndarrays_to_parameters([]), True
    )
    workflow = SecAggPlusWorkflow(
        given.neighbours + 1,
        given.threshold,
        max_weight=1.0,
        clipping_range=_CLIPPING_RANGE,
        quantization_range=_QUANTIZATION_RANGE,
    )
    begin = time.process_time()
    workflow(group, context)
    server = time.process_time() - begin - group.harness_seconds
    if strategy.mean is None:
        raise RuntimeError("Flower made no sum; see its log.")
    step = 2 * _CLIPPING_RANGE / _QUANTIZATION_RANGE
    np.testing.assert_allclose(strategy.mean, vectors[given.drop_outs :].mean(0), atol=2 * step)
    facts = {
        name: {stage: counts[stage] / calls for stage, calls in group.calls.items()}
        for name, counts in (
            ("device_s", group.seconds),
            ("bytes_up", group.bytes_up),
            ("bytes_down", group.bytes_down),
        )
    }
    print(json.dumps({"flwr": flwr.__version__, "server_s": server, **facts}))


if __name__ == "__main__":
    main()
