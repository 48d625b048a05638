"""Creates a host of the kind that its name stands for."""

from __future__ import annotations

from tff_dpftrl.runtime.cluster import placement
from tff_dpftrl.runtime.cluster.coordinator_host import CoordinatorHost
from tff_dpftrl.runtime.cluster.deployment import ClusterDeployment
from tff_dpftrl.runtime.cluster.host import Host
from tff_dpftrl.runtime.cluster.selector_host import SelectorHost
from tff_dpftrl.runtime.cluster.transport import Transport
from tff_dpftrl.runtime.cluster.worker_host import WorkerHost


def make(name: str, deployment: ClusterDeployment, transport: Transport) -> Host:
    """Creates one of the deployment's hosts, which is not started."""
    if name == placement.COORDINATOR:
        kind = CoordinatorHost
    else:
        kind = WorkerHost if placement.is_worker(name) else SelectorHost
    return kind(name, deployment, transport)
