"""Counts as rounds of learning: what they release is the sum of clipped histograms."""

import numpy as np

from tests.learning import counted_rounds


def test_sums_of_all_rounds_are_exact_without_noise():
    one, two, large = [[1, 0, 2], [0, 1, 0]], [[3, 0, 0]], [[30, 0, 40]]
    sums, metrics = counted_rounds.released(3, 0.0, [[one, two, []], [two, large]])
    # The last client is clipped from norm 50 to 5; CLIP_MARGIN is 1e-5 of that.
    np.testing.assert_allclose(sums, [1 + 3 + 3 + 3, 1, 2 + 4], rtol=2e-5)
    assert metrics["client_work"]["train"]["num_examples"] == 4
