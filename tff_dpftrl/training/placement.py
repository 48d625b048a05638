"""Where the clients of a run work."""

from __future__ import annotations

import dataclasses

from tff_dpftrl import packages, validation
from tff_dpftrl.execution import ray_address as ray_address_lib


@dataclasses.dataclass(frozen=True)
class Placement:
    """Place in which the clients of a run work: in this process, or in workers of a Ray cluster.

    It is no option of the run: to float rounding, the sums of the clients are the same
    wherever they work. Each resumption may choose another placement.

    Attributes:
      ray_workers: Number of Ray workers; one for each core if None and `ray_address` is given.
      ray_address: Address of a Ray cluster, "host:port" or "auto". If None, Ray is started on
        this machine for `ray_workers`.
    """

    ray_workers: int | None = None
    ray_address: str | None = None

    def __post_init__(self):
        if self.ray_workers is not None:
            validation.integer("ray_workers", self.ray_workers, minimum=1)
        if self.ray_address is not None:
            ray_address_lib.check(self.ray_address)

    @property
    def uses_ray(self) -> bool:
        """Whether clients work on Ray."""
        return self.ray_workers is not None or self.ray_address is not None

    def check(self) -> None:
        """Raises a UsageError if clients work on Ray and it is not installed."""
        if self.uses_ray:
            packages.require("Each of ray_workers and ray_address", "ray")
