"""Which kind of host a name stands for."""

from __future__ import annotations

from tff_dpftrl.runtime.cluster import placement
from tff_dpftrl.runtime.cluster.coordinator_host import CoordinatorHost
from tff_dpftrl.runtime.cluster.deployment import Deployment
from tff_dpftrl.runtime.cluster.host import Host
from tff_dpftrl.runtime.cluster.selector_host import SelectorHost
from tff_dpftrl.runtime.cluster.transport import Transport
from tff_dpftrl.runtime.cluster.worker_host import WorkerHost


def make(name: str, deployment: Deployment, transport: Transport) -> Host:
    """The host of a name, not started; raises what `Host` does."""
    if name == placement.COORDINATOR:
        kind = CoordinatorHost
    else:
        kind = WorkerHost if placement.is_worker(name) else SelectorHost
    return kind(name, deployment, transport)
