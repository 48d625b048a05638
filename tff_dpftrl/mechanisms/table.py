"""Table of mechanisms: builds the strategy of a mechanism's name.

Commands, the planner and the Python API build named mechanisms here, with the same defaults: one
name, one participation schema and one noise multiplier are one ε. To add a mechanism, add a row to
`MECHANISMS`. A new class of strategies also has to be added to `serialization`, and a new kind of
noise to `private_round.noise_stream`.

`defaults` has the defaults and their reasons. A BLT has the least MaxLoss, as many buffers as still
lower it by 0.1 %, and decays up to 1 - 1 / num_rounds; a banded C has min_sep bands, a banded
inverse 16. All others minimise RmsLoss if they are optimised.

The builders import what they need when they are called: `--help` must be quick.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import defaults

if TYPE_CHECKING:
    from tff_dpftrl.mechanisms import strategy as strategy_lib
    from tff_dpftrl.mechanisms import workload as workload_lib
    from tff_dpftrl.participation import schema as schema_lib

_SECONDS_BETWEEN_STEPS = 10.0
_LONG = 10_000_000

Notify = Callable[[str], None]
"""Callback for sentences to the user: progress, and advice."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a mechanism; None is the mechanism's default.

    Attributes:
      error: Loss to minimise, "max" (the noise in the last, or worst, prefix sum) or
        "rms" (its root mean square over rounds).
      buffers: Number of buffers of a BLT, 1 to 8.
      max_decay: Largest buffer decay of a BLT; 1 for no bound, as in the paper.
      bands: Number of bands of C, or of its inverse.
      correlation: λ of lambda-cgd, in [0, 1]; tuned by default.
      checkpoint: File to which a BandMF search is saved, and from which it resumes.
      workload: Workload of the whole run, whose models' error is minimised; None for the
        prefix sums.
    """

    error: Literal["max", "rms"] | None = None
    buffers: int | None = None
    max_decay: float | None = None
    bands: int | None = None
    correlation: float | None = None
    checkpoint: str | None = None
    workload: workload_lib.Workload | None = None

    def __post_init__(self):
        if self.error not in (None, "max", "rms"):
            raise validation.UsageError(f"error must be 'max' or 'rms', got {self.error!r}.")

    def given(self) -> list[str]:
        """Returns the names of the options that are not None."""
        names = (field.name for field in dataclasses.fields(self))
        return [name for name in names if getattr(self, name) is not None]


DEFAULTS = Options()
"""Options that leave everything to the mechanism's defaults."""

Builder = Callable[["schema_lib.MinSep", Options, Notify], "strategy_lib.Strategy"]


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """Row of the table of mechanisms.

    `build` builds the strategy of a run without restarts. `options` are names of the `Options` that
    the mechanism takes. If not `runnable`, its noise cannot be generated round after round. The
    planner, which needs dozens of optima, tries `quick` ones by default. `max_rounds` is given if
    time and memory grow with it.
    """

    summary: str
    build: Builder
    options: tuple[str, ...] = ()
    runnable: bool = True
    quick: bool = True
    max_rounds: int | None = None


def _blt(schema: schema_lib.MinSep, options: Options, notify: Notify) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import blt_optimize

    result = blt_optimize.search(
        schema,
        num_buffers=options.buffers,
        minimize_rms=options.error == "rms",
        max_decay=options.max_decay,
        workload=options.workload,
    )
    if result.surplus_buffers:
        notify(
            f"{options.buffers} buffers are more than this schema can use; "
            f"{result.strategy.num_buffers} reach the same loss."
        )
    bound = defaults.max_decay(schema.num_rounds)
    if result.strategy.buf_decay[0] > bound:
        notify(
            "The largest decay is so close to 1 that it ties this BLT to "
            f"{schema.num_rounds} rounds; to run longer, leave max_decay out: it is at most "
            f"{bound:.6g} then."
        )
    return result.strategy


def _bandmf(schema: schema_lib.MinSep, options: Options, notify: Notify) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import banded_optimize

    return banded_optimize.optimize_banded(
        schema,
        _bands(schema, options),
        minimize_rms=options.error != "max",
        checkpoint=options.checkpoint,
        progress=_now_and_then(notify),
        workload=options.workload,
    )


def _now_and_then(notify: Notify) -> Callable[[int, float], None]:
    """Returns a callback for steps and losses that shows the long searches are alive."""
    shown = time.monotonic()

    def progress(step: int, loss: float) -> None:
        nonlocal shown
        if time.monotonic() - shown >= _SECONDS_BETWEEN_STEPS:
            shown = time.monotonic()
            notify(f"Optimising the mechanism: step {step}, loss {loss:.6f}.")

    return progress


def _bandtoep(schema: schema_lib.MinSep, options: Options, notify: Notify) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import banded_toeplitz_optimize

    return banded_toeplitz_optimize.optimize_banded_toeplitz(
        schema,
        _bands(schema, options),
        minimize_rms=options.error != "max",
        workload=options.workload,
    )


def _bandfhu(schema: schema_lib.MinSep, options: Options, notify: Notify) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import banded_toeplitz

    return banded_toeplitz.BandedToeplitz.fhu(_bands(schema, options))


def _bands(schema: schema_lib.MinSep, options: Options) -> int:
    return defaults.bands(schema) if options.bands is None else options.bands


def _bisr(schema: schema_lib.MinSep, options: Options, notify: Notify) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import inverse_banded

    return inverse_banded.InverseBanded.bisr(_inverse_bands(options))


def _bifr(schema: schema_lib.MinSep, options: Options, notify: Notify) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import inverse_banded_optimize

    return inverse_banded_optimize.optimize_bifr(
        schema,
        _inverse_bands(options),
        minimize_rms=options.error != "max",
        workload=options.workload,
    )


def _bandinv(schema: schema_lib.MinSep, options: Options, notify: Notify) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import inverse_banded_optimize

    return inverse_banded_optimize.optimize_inverse_banded(
        schema,
        _inverse_bands(options),
        minimize_rms=options.error != "max",
        workload=options.workload,
    )


def _inverse_bands(options: Options) -> int:
    return defaults.INVERSE_BANDS if options.bands is None else options.bands


def _lambda_cgd(
    schema: schema_lib.MinSep, options: Options, notify: Notify
) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import inverse_banded

    if options.correlation is not None:
        given = [name for name in options.given() if name != "correlation"]
        if given:
            raise validation.UsageError(
                f"{given[0]} has no meaning for a given correlation: leave one of them out."
            )
        return inverse_banded.InverseBanded.lambda_cgd(options.correlation)
    # λ-CGD is γ-BIFR with two bands: (1 - x)^γ = 1 - γ x + ...
    return _bifr(schema, dataclasses.replace(options, bands=2), notify)


def _tree(schema: schema_lib.MinSep, options: Options, notify: Notify) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import tree

    return tree.Tree(schema.num_rounds)


def _tree_vanilla(
    schema: schema_lib.MinSep, options: Options, notify: Notify
) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import tree

    return tree.Tree(schema.num_rounds, variance_reduction=False)


def _tree_full(
    schema: schema_lib.MinSep, options: Options, notify: Notify
) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import tree

    return tree.FullTree()


def _identity(schema: schema_lib.MinSep, options: Options, notify: Notify) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import identity

    return identity.Identity()


MECHANISMS: dict[str, Mechanism] = {
    "blt": Mechanism(
        "buffered linear Toeplitz: a few buffers, any number of rounds",
        _blt,
        ("error", "buffers", "max_decay", "workload"),
    ),
    "bandmf": Mechanism(
        "banded matrix of least loss: bands - 1 model copies, seconds to minutes to optimise",
        _bandmf,
        ("error", "bands", "checkpoint", "workload"),
        quick=False,
        max_rounds=_LONG,
    ),
    "bandtoep": Mechanism(
        "banded Toeplitz matrix, optimised",
        _bandtoep,
        ("error", "bands", "workload"),
        max_rounds=_LONG,
    ),
    "bandfhu": Mechanism(
        "banded square root of the prefix sum, not optimised", _bandfhu, ("bands",)
    ),
    "bisr": Mechanism(
        "banded inverse of the square root of the prefix sum: no memory", _bisr, ("bands",)
    ),
    "bifr": Mechanism(
        "banded inverse (1 - x)^γ with γ tuned: no memory", _bifr, ("error", "bands", "workload")
    ),
    "bandinv": Mechanism(
        "banded inverse of least loss, all coefficients optimised: no memory",
        _bandinv,
        ("error", "bands", "workload"),
        quick=False,
        max_rounds=_LONG,
    ),
    "lambda-cgd": Mechanism(
        "subtracts a share of the noise of the round before",
        _lambda_cgd,
        ("error", "correlation", "workload"),
    ),
    "tree": Mechanism("binary tree with online variance reduction", _tree),
    "tree-vanilla": Mechanism("binary tree as first published", _tree_vanilla),
    "tree-full": Mechanism(
        "binary tree with full variance reduction; cannot be run, only compared",
        _tree_full,
        runnable=False,
        max_rounds=_LONG,
    ),
    "identity": Mechanism("independent noise", _identity),
}


def runnable() -> list[str]:
    """Returns the names of the mechanisms that a run can use."""
    return [name for name, mechanism in MECHANISMS.items() if mechanism.runnable]


def check(name: str, options: Options = DEFAULTS) -> Mechanism:
    """Returns the mechanism of a name, and checks that it takes the given options."""
    if not isinstance(name, str) or name not in MECHANISMS:
        raise validation.UsageError(
            f"mechanism must be one of {', '.join(MECHANISMS)}, got {name!r}."
        )
    for option in options.given():
        if option not in MECHANISMS[name].options:
            raise validation.UsageError(
                f"{option} is for the mechanism {' or '.join(takers(option))}, not for {name}: "
                "leave it out."
            )
    return MECHANISMS[name]


def fitting(name: str, options: Options) -> Options:
    """Returns `options` without those that the mechanism does not take."""
    takes = check(name).options
    return dataclasses.replace(
        options, **{option: None for option in options.given() if option not in takes}
    )


def takers(option: str) -> list[str]:
    """Returns the names of the mechanisms that take an option."""
    return [name for name, mechanism in MECHANISMS.items() if option in mechanism.options]


def build(
    name: str,
    schema: schema_lib.MinSep,
    options: Options = DEFAULTS,
    *,
    starts: Sequence[int] = (0,),
    notify: Notify | None = None,
) -> strategy_lib.Strategy:
    """Builds the strategy of a whole run, restarts included.

    Args:
      name: Name of the mechanism, a key of `MECHANISMS`.
      schema: Participation schema of the whole run.
      options: Options of the mechanism.
      starts: First rounds of the blocks between restarts, the first one 0;
        `restarts.starts` computes them.
      notify: Callback for progress and advice, one sentence a call; None to drop them.

    Returns:
      The strategy, made for the longest block and begun anew at `starts`.

    Raises:
      ValueError: If there is no such mechanism, or an option cannot be used.
    """
    import numpy as np

    from tff_dpftrl.mechanisms import restarts
    from tff_dpftrl.participation import schema as schema_lib

    mechanism = check(name, options)
    longest = restarts.longest_block(schema.num_rounds, starts)
    if mechanism.max_rounds is not None and longest > mechanism.max_rounds:
        unlimited = [other for other, row in MECHANISMS.items() if row.max_rounds is None]
        raise validation.UsageError(
            f"mechanism {name} is for at most {mechanism.max_rounds} rounds, got "
            f"{longest}: its time and memory grow with them. Take one of "
            f"{', '.join(unlimited)}."
        )
    block = schema_lib.MinSep(
        longest, min(schema.min_sep, longest), min(schema.max_participations, longest)
    )
    if options.workload is not None:
        if options.workload.num_rounds != schema.num_rounds:
            raise validation.UsageError(
                f"workload is for {options.workload.num_rounds} rounds, and the schema for "
                f"{schema.num_rounds}: make it for as many."
            )
        start = starts[int(np.argmax(np.diff([*starts, schema.num_rounds])))]
        of_block = options.workload.rounds(start, start + longest)
        options = dataclasses.replace(options, workload=of_block)
    base = mechanism.build(block, options, (lambda sentence: None) if notify is None else notify)
    return restarts.whole_run(base, schema.num_rounds, starts)
