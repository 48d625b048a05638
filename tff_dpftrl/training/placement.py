"""Where the clients of a run work."""

from __future__ import annotations

import dataclasses
import importlib.util

from tff_dpftrl import validation
from tff_dpftrl.execution import worker_addresses


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the clients of a run work: in this process, or elsewhere.

    It is no option of the run, which has the same noise and, to float rounding, the same
    model wherever its clients work; it may be another one after every resumption.

    Attributes:
      workers: Addresses, host:port, of TFF's remote workers; for engine 'tff'.
      trust_network: Whether `workers` may be on other machines; what is sent to them is
        neither encrypted nor authenticated.
      ray_workers: Number of Ray workers; for engine 'compiled'.
      ray_address: Address of a Ray cluster; Ray is started on this machine if None.
    """

    workers: tuple[str, ...] | None = None
    trust_network: bool = False
    ray_workers: int | None = None
    ray_address: str | None = None

    def __post_init__(self):
        if self.ray_workers is not None:
            validation.integer("ray_workers", self.ray_workers, minimum=1)
        if self.trust_network and not self.workers:
            raise validation.UsageError(
                "trust_network has a meaning with workers only: leave it out."
            )
        if self.ray_address is not None:
            worker_addresses.check_of_ray(self.ray_address)
        if self.workers is not None:
            worker_addresses.check(self.workers, trust_network=self.trust_network)
        if self.workers and self.uses_ray:
            raise validation.UsageError(
                "clients work on TFF's workers or on Ray, not on both: name one."
            )

    @property
    def uses_ray(self) -> bool:
        """Whether clients work on Ray."""
        return self.ray_workers is not None or self.ray_address is not None

    def check(self, engine: str) -> None:
        """Refuses an engine that cannot run clients there, and what is not installed.

        Args:
          engine: Of the run's config.

        Raises:
          ValueError: If it cannot.
        """
        for needed, wanted, name in (
            ("tff", bool(self.workers), "workers"),
            ("compiled", self.uses_ray, "ray_workers and ray_address"),
        ):
            if wanted and engine != needed:
                raise validation.UsageError(
                    f"{name} need a run with engine {needed!r}, and this one has {engine!r}: a run "
                    f"keeps its engine, so begin one with engine {needed!r}, or leave them out."
                )
        if self.uses_ray and importlib.util.find_spec("ray") is None:
            raise validation.UsageError(
                "ray_workers and ray_address need Ray, which is not installed: "
                "pip install 'tff_dpftrl[distributed]'."
            )
