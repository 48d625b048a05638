"""Tests of the checks of arguments."""

import math
import sys
import types

import numpy as np
import pytest

from tff_dpftrl import validation


def test_values_come_back_as_plain_numbers():
    assert type(validation.integer("n", np.int64(3), minimum=3)) is int
    assert type(validation.number("x", np.float32(0.5))) is float
    assert validation.positive("x", 2) == 2.0
    assert validation.probability("q", 1) == 1.0
    assert validation.noise_multiplier(0) == 0.0
    assert validation.delta(1e-300) == 1e-300


@pytest.mark.parametrize("value", [2, 2.5, "3", None, math.nan, True])
def test_integers(value):
    with pytest.raises(ValueError, match=r"^n must be (an integer|at least 3), got"):
        validation.integer("n", value, minimum=3)


def test_sequences_of_numbers():
    assert validation.numbers("xs", np.array([1, 2])) == (1.0, 2.0)
    for values in (3, None, ["a"], "ab"):
        with pytest.raises(ValueError, match="xs must be a sequence of numbers, got"):
            validation.numbers("xs", values)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, -math.inf, math.nan, "1", None, 10**400])
def test_positive(value):
    with pytest.raises(ValueError, match=r"^x must be a finite number, above 0, got .*\. Raise it"):
        validation.positive("x", value, remedy="Raise it.")


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (validation.probability, 0.0),
        (validation.probability, 1.0 + 1e-9),
        (lambda name, value: validation.delta(value, name), 1.0),
        (lambda name, value: validation.delta(value, name), 0.0),
        (lambda name, value: validation.noise_multiplier(value, name), -1e-9),
        (lambda name, value: validation.noise_multiplier(value, name), math.inf),
        (lambda name, value: validation.number(name, value, at_least=1, below=2), 2.0),
    ],
)
def test_bounds(check, value):
    with pytest.raises(ValueError, match=f"^x must be a finite number, .*got {value!r}"):
        check("x", value)


class _TorchDtype:
    """Stands for a dtype of PyTorch, which has no name but its text."""

    def __init__(self, text):
        self._text = text

    def __str__(self):
        return self._text


@pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "float8_e5m2", "complex64", "int8", "bool"]
)
def test_floats_of_all_frameworks_are_known_from_other_numbers(name):
    for dtype in (types.SimpleNamespace(name=name), _TorchDtype(f"torch.{name}")):
        if "float" in name:
            validation.float_dtype("xs", dtype)
        else:
            with pytest.raises(validation.UsageError, match=f"^xs must have only .* got {name}: "):
                validation.float_dtype("xs", dtype)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
