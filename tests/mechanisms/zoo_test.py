"""Re-verifies every certificate of the zoo, from coefficients where they fit in memory."""

import decimal
import math

import numpy as np
import pytest

from tff_dpftrl.accounting import guarantee
from tff_dpftrl.mechanisms import blt, blt_optimize, serialization, zoo
from tff_dpftrl.mechanisms.numerics import toeplitz
from tff_dpftrl.participation import schema as schema_lib


def _certificate(name):
    return serialization.load_certificate(zoo._path(name))


@pytest.mark.parametrize("name", zoo.names())
def test_certificate_holds(name):
    strategy, claim = zoo.load(name), _certificate(name)
    claim.verify(strategy)
    assert claim.sensitivity_exact
    assert isinstance(strategy, blt.Blt)
    # Independent of the closed forms: coefficients and forward substitution.
    n = claim.num_rounds
    column = strategy.coefficients(n)
    assert toeplitz.is_non_increasing(column)
    squared = toeplitz.earliest_pattern_norm_squared(column, claim.schema)
    assert math.sqrt(squared) == pytest.approx(claim.sensitivity, rel=1e-10)
    if n <= 10_000:
        variance = toeplitz.prefix_noise_variance(toeplitz.inverse_coefficients(column, n))
        assert math.sqrt(variance[-1]) == pytest.approx(claim.max_error, rel=1e-10)
        assert math.sqrt(np.mean(variance)) == pytest.approx(claim.rms_error, rel=1e-10)


_MADE_HERE = [name for name in zoo.names() if "gboard" not in name]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if i % 3 else []) for i, n in enumerate(_MADE_HERE)],
)
def test_name_tells_the_schema_and_the_optimum(name):
    claim = _certificate(name)
    schema = f"blt-n{claim.num_rounds}-b{claim.min_sep}-k{claim.max_participations}"
    variant = name.removeprefix(schema)
    assert variant in ("", "-rms", "-bounded")
    fresh = blt_optimize.search(
        claim.schema,
        num_buffers=4,
        minimize_rms=variant == "-rms",
        max_decay=1 - 1 / claim.num_rounds if variant == "-bounded" else 1,
    )
    kept = claim.rms_loss if variant == "-rms" else claim.max_loss
    assert kept == pytest.approx(fresh.loss, rel=1e-5)
    if variant == "-bounded":
        assert zoo.load(name).buf_decay[0] <= 1 - 1 / claim.num_rounds


# McMahan, Xu & Zhang 2024, Table 4, its rows of BLTs, all with δ = 1e-10: rounds, MinS (a gap),
# MaxP, noise multiplier, ρ and ε as printed.
_TABLE_4 = {
    "es-ES": ("blt-gboard-b400", 1280, 300, 4, 7.379, "0.16", "3.46"),
    "id-ID": ("blt-gboard-b400", 2350, 447, 5, 7.379, "0.20", "3.93"),
    "pt-BR": ("blt-gboard-b1000", 2000, 2001, 1, 8.681, "0.0223", "1.25"),
    "pt-BR 16.1": ("blt-gboard-b1000", 2000, 1181, 2, 16.1, "0.0140", "0.98"),
    "pt-PT": ("blt-gboard-b100", 430, 92, 4, 3.12, "1.11", "10.19"),
    "pt-PT 5.5": ("blt-gboard-b100", 320, 49, 6, 5.5, "0.75", "8.19"),
}


def _rounded_up(value, printed):
    """Rounds up to as many digits as are printed."""
    digits = decimal.Decimal(printed)
    return decimal.Decimal(value).quantize(digits, rounding=decimal.ROUND_CEILING)


@pytest.mark.parametrize("row", _TABLE_4)
def test_published_privacy(row):
    name, num_rounds, gap, participations, noise_multiplier, rho, epsilon = _TABLE_4[row]
    schema = schema_lib.MinSep.from_gap(num_rounds, gap, participations)
    claim = guarantee.dp_ftrl_guarantee(
        zoo.load(name), noise_multiplier=noise_multiplier, schema=schema, delta=1e-10
    )
    assert _rounded_up(claim.rho_zcdp, rho) == decimal.Decimal(rho)
    # The paper's ε is of the ρ before it was rounded.
    assert _rounded_up(claim.epsilon, epsilon) == decimal.Decimal(epsilon)
    # Independent: the norms of sums of columns of C, for the first pattern and others.
    power = np.arange(num_rounds - 1)[:, np.newaxis]
    decay, scale = (np.array(x) for x in (zoo.load(name).buf_decay, zoo.load(name).output_scale))
    column = np.concatenate([[1.0], decay**power @ scale])
    rng, norms = np.random.default_rng(39), []
    for trial in range(100):
        late = rng.integers(num_rounds - (participations - 1) * (gap + 1), size=participations)
        starts = np.arange(participations) * (gap + 1) + np.sort(late) * (trial > 0)
        total = sum(np.pad(column, (start, 0))[:num_rounds] for start in starts)
        norms.append(np.sum(np.square(total)))
    assert max(norms) == norms[0]
    assert norms[0] / (2 * noise_multiplier**2) == pytest.approx(claim.rho_zcdp, rel=1e-12)


def test_a_name_is_a_file_first_and_an_entry_or_nothing_then(tmp_path, monkeypatch):
    name = "blt-gboard-b100"
    assert zoo.find(name) == zoo.load(name)
    own = blt.Blt([0.9], [0.3])
    monkeypatch.chdir(tmp_path)
    serialization.save(name, own)
    assert zoo.find(name) == own
    with pytest.raises(ValueError, match="from blt-gboard-b10: .* no entry .* blt-gboard-b100,"):
        zoo.find("blt-gboard-b10")
    assert "blt-n2000-b400-k5" in zoo.names()
    with pytest.raises(ValueError, match="blt-n2000-b400-k5"):
        zoo.load("blt-n1")
