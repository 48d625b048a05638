"""Events of DP-FTRL runs, which the accountants of dp_accounting accept.

TensorFlow Privacy's tree aggregators emit an `UnsupportedDpEvent`, which has no epsilon. A DP-FTRL
run is one Gaussian mechanism, so its event *is* a `GaussianDpEvent`, with further facts.
"""

from __future__ import annotations

import math

import attr
import dp_accounting

from tff_dpftrl import validation


@attr.s(frozen=True, slots=True, auto_attribs=True)
class DpFtrlDpEvent(dp_accounting.GaussianDpEvent):
    """One whole run of a matrix mechanism under a participation schema.

    The accountants treat it as the Gaussian mechanism that it is; composing it twice is running
    twice on the same clients. Neighbours zero out one client. The inherited `noise_multiplier` is
    standard deviation over sensitivity of the equivalent Gaussian, z / (S · clip_norm_inflation);
    `strategy_noise_multiplier` is z, and `clip_norm_inflation` the norm bound of what is summed,
    divided by the clip norm.
    """

    strategy_noise_multiplier: float
    sensitivity_squared: float
    clip_norm_inflation: float
    num_rounds: int
    min_sep: int
    max_participations: int

    def __attrs_post_init__(self):
        sensitivity = math.sqrt(self.sensitivity_squared) * self.clip_norm_inflation
        expected = self.strategy_noise_multiplier / sensitivity
        if not math.isclose(self.noise_multiplier, expected, rel_tol=1e-9):
            raise validation.UsageError(
                f"noise_multiplier of a DpFtrlDpEvent must be z / (S · inflation) = {expected!r}, "
                f"got {self.noise_multiplier!r}; build the event with Guarantee.to_dp_event()."
            )
