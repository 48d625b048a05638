"""Every kernel, run on a basis, is the dense linear map it stands for."""

import numpy as np
import pytest
import tensorflow as tf

from tests.private_round import unit_draws
from tff_dpftrl.mechanisms import noise_recipe
from tff_dpftrl.private_round import noise_stream

# Published production BLT (Google, min-sep 400, n = 2000).
_PRODUCTION = noise_recipe.BufferedNoise(
    buf_decay=(0.9999999999921251, 0.9944453083640997, 0.8985923474607591, 0.4912001418098778),
    output_scale=(0.0070314825502323835, 0.10613806907600574, 0.1898159060327625, 0.1966594748),
)


def _run_with_ids(recipe, num_rounds):
    """Dense map of a kernel whose draws are numbered sparsely, [num_rounds, number of draws]."""
    kernel = noise_stream.build_kernel(recipe)
    columns, rows = {}, []
    size = 8 * num_rounds * recipe.num_levels

    def draw(i):
        return tf.one_hot(columns.setdefault(int(i), len(columns)), size)

    buffer = tf.fill([kernel.num_buffers, size], 1e6) if kernel.num_buffers else None
    for t in range(num_rounds):
        noise, buffer = kernel.step(buffer, tf.constant(t, tf.int64), draw)
        rows.append(noise.numpy())
    assert len(columns) <= size
    return np.stack(rows)[:, : len(columns)]


def _blt_matrix(recipe, num_rounds):
    theta, omega = np.asarray(recipe.buf_decay), np.asarray(recipe.output_scale)
    lags = np.arange(1, num_rounds)[:, np.newaxis]
    coefs = np.concatenate([[1.0], np.sum(omega * theta ** (lags - 1), axis=1)])
    i, j = np.indices((num_rounds, num_rounds))
    return np.where(i >= j, coefs[np.maximum(i - j, 0)], 0.0)


def _tree_residual_covariance(num_rounds, variance_reduction):
    """Covariance of ẑ from the definition, bottom-up over materialised nodes."""
    height = int(np.ceil(np.log2(num_rounds + 1)))
    num_leaves = 2**height
    estimates, variances = [np.eye(num_leaves, 2 * num_leaves)], [1.0]
    next_column = num_leaves
    for _ in range(height):
        children = estimates[-1][0::2] + estimates[-1][1::2]
        own = np.zeros_like(children)
        own[np.arange(len(own)), next_column + np.arange(len(own))] = 1.0
        next_column += len(own)
        child_variance = 2 * variances[-1]
        weight = child_variance / (1 + child_variance) if variance_reduction else 1.0
        estimates.append(weight * own + (1 - weight) * children)
        variances.append(float(np.sum(estimates[-1][0] ** 2)))
    prefix = [np.zeros(2 * num_leaves)]
    for t in range(1, num_rounds + 1):
        total, start = np.zeros(2 * num_leaves), 0
        for level in reversed(range(height + 1)):
            if t >> level & 1:
                total = total + estimates[level][start >> level]
                start += 2**level
        prefix.append(total)
    residuals = np.diff(np.stack(prefix), axis=0)
    return residuals @ residuals.T


def test_identity_is_the_draw():
    np.testing.assert_array_equal(
        unit_draws.run_on_basis(noise_recipe.IdentityNoise(), 7), np.eye(7)
    )


@pytest.mark.parametrize(
    "recipe",
    [noise_recipe.BufferedNoise((), ()), noise_recipe.BufferedNoise((0.5,), (0.25,)), _PRODUCTION],
    ids=["no-buffer", "one", "production"],
)
def test_buffered_inverts_c(recipe):
    n = 60
    noise = unit_draws.run_on_basis(recipe, n)
    np.testing.assert_allclose(noise, np.linalg.inv(_blt_matrix(recipe, n)), atol=1e-5)


@pytest.mark.parametrize("bands", [1, 2, 5])
def test_banded_toeplitz_inverts_c(bands):
    n, row = 40, (2.0, 0.7, 0.4, 0.2, 0.1)[:bands]
    c = sum(np.diag(np.full(n - j, row[j]), -j) for j in range(bands))
    noise = unit_draws.run_on_basis(noise_recipe.BandedNoise((row,)), n)
    np.testing.assert_allclose(noise, np.linalg.inv(c), atol=1e-6)


def test_general_banded_inverts_c():
    n, bands = 30, 4
    rng = np.random.default_rng(7)
    rows = rng.uniform(0.1, 0.5, (n, bands))
    rows[:, 0] += 1.0
    c = np.zeros((n, n))
    for t in range(n):
        for j in range(min(t, bands - 1) + 1):
            c[t, t - j] = rows[t, j]
    noise = unit_draws.run_on_basis(noise_recipe.BandedNoise(tuple(map(tuple, rows))), n)
    np.testing.assert_allclose(noise, np.linalg.inv(c), atol=1e-6)


def test_inverse_banded_toeplitz():
    n, row = 20, (1.0, -0.5, -0.125)
    expected = sum(np.diag(np.full(n - j, row[j]), -j) for j in range(3))
    noise = unit_draws.run_on_basis(noise_recipe.InverseBandedNoise((row,)), n)
    np.testing.assert_allclose(noise, expected, atol=1e-7)


def test_general_inverse_banded_with_short_and_full_rows():
    n = 12
    rng = np.random.default_rng(3)
    rows = [tuple(rng.normal(size=min(t + 1, 5 if t % 2 else 12))) for t in range(n)]
    expected = np.zeros((n, n))
    for t, row in enumerate(rows):
        for j, value in enumerate(row):
            expected[t, t - j] = value
    noise = unit_draws.run_on_basis(noise_recipe.InverseBandedNoise(tuple(rows)), n)
    np.testing.assert_allclose(noise, expected, atol=1e-6)


@pytest.mark.parametrize(
    "num_levels, variance_reduction",
    [
        *((levels, reduces) for levels in (1, 2, 3) for reduces in (False, True)),
        pytest.param(6, False, marks=pytest.mark.slow),
        (6, True),
    ],
)
def test_tree_residuals_have_the_covariance_of_the_definition(num_levels, variance_reduction):
    n = 2**num_levels - 1
    dense = _run_with_ids(noise_recipe.TreeNoise(num_levels, variance_reduction), n)
    expected = _tree_residual_covariance(n, variance_reduction)
    np.testing.assert_allclose(dense @ dense.T, expected, atol=2e-6)


def test_tree_covariance_test_has_power():
    reduced = _tree_residual_covariance(15, True)
    vanilla = _tree_residual_covariance(15, False)
    assert np.max(np.abs(reduced - vanilla)) > 0.1


@pytest.mark.parametrize("variance_reduction", [True, False])
@pytest.mark.parametrize("num_levels", [1, 3])
def test_a_tree_ends_with_the_last_round_that_has_fresh_noise(num_levels, variance_reduction):
    kernel = noise_stream.build_kernel(noise_recipe.TreeNoise(num_levels, variance_reduction))
    assert kernel.max_rounds == 2**num_levels - 1  # A round more would need another level.


def test_tree_of_more_levels_than_needed_has_the_same_law():
    n = 21
    dense = _run_with_ids(noise_recipe.TreeNoise(9, True), n)
    np.testing.assert_allclose(dense @ dense.T, _tree_residual_covariance(n, True), atol=2e-6)


def test_unknown_recipe_is_refused():
    with pytest.raises(ValueError, match="recipe for one block"):
        noise_stream.build_kernel("tree")


@pytest.mark.parametrize(
    ("recipe", "draws"),
    [
        (noise_recipe.TreeNoise(9, True), 1),
        (noise_recipe.TreeNoise(9, False), 2),
        (noise_recipe.InverseBandedNoise(((1.0, -0.5, -0.125),)), 3),
        # A block of four makes at most two past draws again, and four of its own.
        (noise_recipe.InverseBandedNoise(((1.0, -0.5, -0.125),), 4), 1.5),
    ],
)
def test_a_round_makes_few_draws_of_which_one_is_new(recipe, draws):
    kernel, drawn, num_rounds = noise_stream.build_kernel(recipe), [], 256
    buffer = tf.zeros([kernel.num_buffers, 1]) if kernel.num_buffers else None
    for t in map(tf.constant, range(num_rounds)):
        t, made = tf.cast(t, tf.int64), []

        def draw(i, made=made):
            made.append(int(i))
            return tf.zeros([1])

        _, buffer = kernel.step(buffer, t, draw)
        new = {i for i in made if i not in drawn}
        assert new == {int(kernel.new_draw(t))}
        drawn += made
        assert len(set(made)) == len(made)
    assert len(drawn) <= draws * num_rounds


@pytest.mark.parametrize("num_levels", [1, 5])
def test_bottom_up_weights_are_those_of_the_definition(num_levels):
    own, left = noise_recipe.TreeNoise(num_levels, True).bottom_up()
    # An estimate has the variance 1 / (1 + 1/2 + 1/4 + ...). Those of the left are independent.
    variance = 1 / np.cumsum(0.5 ** np.arange(num_levels))
    np.testing.assert_allclose(own**2 + left**2 @ variance, variance, rtol=1e-12)
    assert not np.any(np.triu(left))
