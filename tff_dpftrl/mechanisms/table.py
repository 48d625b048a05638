"""The one table of mechanisms: what a name stands for, wherever a name can be given.

The commands (`account`, `calibrate`, `compare`, `optimize`, `plan`, `train`), the planner and
the Python API all build a named mechanism here, with the same defaults: one name, one
participation schema and one noise multiplier are one ε. To add a mechanism, add a row to
`MECHANISMS`; a new class of strategies also has to be known to `serialization`, and noise of a
new kind to `private_round.noise_stream`.

The defaults, with their reasons in `defaults`: a BLT has the least MaxLoss, as many buffers as
still lower it by 0.1 %, and decays up to 1 - 1 / num_rounds; a banded C has min_sep bands, a
banded inverse 16. All but the BLT minimise RmsLoss where there is something to
minimise.

The builders import what they need when they are called: names and summaries are wanted by
`--help`, which is to be quick.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from tff_dpftrl import validation
from tff_dpftrl.mechanisms import defaults

if TYPE_CHECKING:
    from tff_dpftrl.mechanisms import strategy as strategy_lib
    from tff_dpftrl.participation import schema as schema_lib

Notify = Callable[[str], None]
"""Receives sentences for a person: progress, and what else is worth knowing."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What may be said about a mechanism; None is the mechanism's default.

    Attributes:
      error: The loss to minimise, "max" (the noise in the last, or worst, prefix sum) or
        "rms" (its root mean square over rounds).
      buffers: Buffers of a BLT, 1 to 8.
      max_decay: Largest buffer decay of a BLT; 1 for no bound, as in the paper.
      bands: Bands of C, or of its inverse.
      correlation: λ of lambda-cgd, in [0, 1]; tuned by default.
      checkpoint: File from which to resume, and to which to save, a BandMF search.
    """

    error: Literal["max", "rms"] | None = None
    buffers: int | None = None
    max_decay: float | None = None
    bands: int | None = None
    correlation: float | None = None
    checkpoint: str | None = None

    def __post_init__(self):
        if self.error not in (None, "max", "rms"):
            raise validation.UsageError(f"error must be 'max' or 'rms', got {self.error!r}.")

    def given(self) -> list[str]:
        """Names of the options that are not None."""
        names = (field.name for field in dataclasses.fields(self))
        return [name for name in names if getattr(self, name) is not None]


DEFAULTS = Options()
"""Nothing is said about the mechanism."""

Builder = Callable[["schema_lib.MinSep", Options, Notify], "strategy_lib.Strategy"]


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """One row of the table.

    Attributes:
      summary: What it is, in a line.
      build: Makes the strategy of a run without restarts.
      options: Names of the `Options` that it takes.
      runnable: Whether its noise can be generated round after round.
      quick: Whether it is optimised in about a second for 2,000 rounds.
    """

    summary: str
    build: Builder
    options: tuple[str, ...] = ()
    runnable: bool = True
    quick: bool = True


def _blt(schema: schema_lib.MinSep, options: Options, notify: Notify) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import blt_optimize

    found = blt_optimize.search(
        schema,
        num_buffers=options.buffers,
        minimize_rms=options.error == "rms",
        max_decay=options.max_decay,
    )
    if found.surplus_buffers:
        notify(
            f"{options.buffers} buffers are more than this schema can use; "
            f"{found.strategy.num_buffers} reach the same loss."
        )
    bound = defaults.max_decay(schema.num_rounds)
    if found.strategy.buf_decay[0] > bound:
        notify(
            "The largest decay is so close to 1 that it ties this BLT to "
            f"{schema.num_rounds} rounds; to run longer, leave max_decay out: it is at most "
            f"{bound:.6g} then."
        )
    return found.strategy


def _bandmf(schema: schema_lib.MinSep, options: Options, notify: Notify) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import banded_optimize

    return banded_optimize.optimize_banded(
        schema,
        _bands(schema, options),
        minimize_rms=options.error != "max",
        checkpoint=options.checkpoint,
        progress=lambda step, loss: notify(f"step {step}: loss {loss:.6f}"),
    )


def _bandtoep(schema: schema_lib.MinSep, options: Options, notify: Notify) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import banded_toeplitz_optimize

    return banded_toeplitz_optimize.optimize_banded_toeplitz(
        schema, _bands(schema, options), minimize_rms=options.error != "max"
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
        schema, _inverse_bands(options), minimize_rms=options.error != "max"
    )


def _inverse_bands(options: Options) -> int:
    return defaults.INVERSE_BANDS if options.bands is None else options.bands


def _lambda_cgd(
    schema: schema_lib.MinSep, options: Options, notify: Notify
) -> strategy_lib.Strategy:
    from tff_dpftrl.mechanisms import inverse_banded

    if options.correlation is not None:
        if options.error is not None:
            raise validation.UsageError(
                "error has no meaning for a given correlation: leave one of them out."
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
        ("error", "buffers", "max_decay"),
    ),
    "bandmf": Mechanism(
        "banded matrix of least loss: bands - 1 model copies, seconds to minutes to optimise",
        _bandmf,
        ("error", "bands", "checkpoint"),
        quick=False,
    ),
    "bandtoep": Mechanism("banded Toeplitz matrix, optimised", _bandtoep, ("error", "bands")),
    "bandfhu": Mechanism(
        "banded square root of the prefix sum, not optimised", _bandfhu, ("bands",)
    ),
    "bisr": Mechanism(
        "inverse of the above banded instead: no memory, noise is drawn again", _bisr, ("bands",)
    ),
    "bifr": Mechanism("the same with the power of (1 - x) tuned", _bifr, ("error", "bands")),
    "lambda-cgd": Mechanism(
        "takes back a share of the noise of the round before",
        _lambda_cgd,
        ("error", "correlation"),
    ),
    "tree": Mechanism("binary tree with online variance reduction", _tree),
    "tree-vanilla": Mechanism("binary tree as first published", _tree_vanilla),
    "tree-full": Mechanism(
        "binary tree with full variance reduction; cannot be run, only compared",
        _tree_full,
        runnable=False,
    ),
    "identity": Mechanism("independent noise", _identity),
}


def runnable() -> list[str]:
    """Names of the mechanisms that a run can use."""
    return [name for name, mechanism in MECHANISMS.items() if mechanism.runnable]


def check(name: str, options: Options = DEFAULTS) -> Mechanism:
    """The mechanism of a name, if it takes the options that are given.

    Raises:
      ValueError: If there is none of that name, or it does not take an option.
    """
    if not isinstance(name, str) or name not in MECHANISMS:
        raise validation.UsageError(
            f"mechanism must be one of {', '.join(MECHANISMS)}, got {name!r}."
        )
    for option in options.given():
        if option not in MECHANISMS[name].options:
            raise validation.UsageError(
                f"{option} is for the mechanism {' or '.join(_takers(option))}, not for {name}: "
                "leave it out."
            )
    return MECHANISMS[name]


def fitting(name: str, options: Options) -> Options:
    """`options` without those that the mechanism does not take."""
    takes = check(name).options
    return dataclasses.replace(
        options, **{option: None for option in options.given() if option not in takes}
    )


def _takers(option: str) -> Iterable[str]:
    return [name for name, mechanism in MECHANISMS.items() if option in mechanism.options]


def build(
    name: str,
    schema: schema_lib.MinSep,
    options: Options = DEFAULTS,
    *,
    starts: Sequence[int] = (0,),
    notify: Notify | None = None,
) -> strategy_lib.Strategy:
    """The strategy of a whole run, restarts included.

    Args:
      name: A key of `MECHANISMS`.
      schema: The participation schema of the whole run.
      options: What is asked of the mechanism.
      starts: First rounds of the blocks between restarts, the first one 0: see
        `restarts.starts`.
      notify: Receives progress and advice, sentence by sentence; dropped if None.

    Returns:
      The strategy, made for the longest block and begun anew at `starts`.

    Raises:
      ValueError: If there is no such mechanism, or an option cannot be used.
    """
    from tff_dpftrl.mechanisms import restarts
    from tff_dpftrl.participation import schema as schema_lib

    mechanism = check(name, options)
    longest = restarts.longest_block(schema.num_rounds, starts)
    block = schema_lib.MinSep(
        longest, min(schema.min_sep, longest), min(schema.max_participations, longest)
    )
    base = mechanism.build(block, options, (lambda sentence: None) if notify is None else notify)
    return restarts.whole_run(base, schema.num_rounds, starts)
