"""Shamir's secret sharing over a prime field (Shamir 1979, "How to share a secret").

The field is that of 2²⁵⁶ + 297, the smallest prime above all numbers of 32 bytes. A secret is
the value at 0 of a random polynomial of a degree below the threshold; a share is its value at
the holder's point, from 1. Any `threshold` shares recover it, fewer reveal nothing about it. Shares
that are wrong can be found where there are more than needed: they are the errors of a
Reed-Solomon code (Gao 2003, "A new algorithm for decoding Reed-Solomon codes").

The time of Python's integer arithmetic depends on the values: this does not protect from an
attacker who can time the arithmetic of a device.
"""

from __future__ import annotations

import itertools
import math
import operator
import secrets
from collections.abc import Callable, Sequence

from tff_dpftrl import validation

PRIME = 2**256 + 297
SHARE_BYTES = 33


def split(
    values: Sequence[int],
    threshold: int,
    num_shares: int,
    *,
    random_below: Callable[[int], int] = secrets.randbelow,
) -> list[tuple[int, ...]]:
    """Splits several secrets into shares for the same holders, at the points 1, 2, 3 and so on.

    Newton's form takes additions only: the values of a polynomial at successive integers are
    running sums of its differences. Uniform differences at 0, from the first to that of order
    threshold - 1, mean the same as uniform coefficients, because each determine the other.

    Secrets are in [0, PRIME). Returns for each point its shares in the order of the secrets.
    `random_below` is replaced in tests only. It raises ValueError if an argument is out of range.
    """
    if not 1 <= threshold <= num_shares:
        raise validation.UsageError(
            f"threshold must be from 1 to num_shares={num_shares}, got {threshold}."
        )
    if not all(0 <= value < PRIME for value in values):
        raise validation.UsageError("values must be from 0 to below PRIME.")
    # Side by side in one large integer the polynomials are summed at once. None reaches the
    # next: its value at x is below PRIME times the sum of binomials "x over k", at most 2^x.
    lane = PRIME.bit_length() + num_shares
    row = [0] * num_shares
    for order in reversed(range(threshold)):
        at_zero = [random_below(PRIME) for _ in values] if order else values
        packed = sum(difference << lane * i for i, difference in enumerate(at_zero))
        row = list(itertools.accumulate(row[:num_shares], initial=packed))
    mask = (1 << lane) - 1
    return [
        tuple((total >> lane * i & mask) % PRIME for i in range(len(values))) for total in row[1:]
    ]


class Recovery:
    """Recovery of secrets from the shares of the same holders, by Lagrange's formula at 0."""

    def __init__(self, points: Sequence[int]):
        """Computes the factors of the shares once.

        There are as many points as the threshold, positive and distinct.
        """
        # The factor of a share is ∏ x_j / ∏ (x_j - x_i) over the others; one inversion for all.
        denominators = [
            point * math.prod(other - point for other in points if other != point) % PRIME
            for point in points
        ]
        inverses = _inverses(denominators)
        product = math.prod(points) % PRIME
        self._factors = [product * inverse % PRIME for inverse in inverses]

    def recover(self, shares: Sequence[int]) -> int:
        """Recovers the secret from its shares, in the order of the points."""
        return sum(map(operator.mul, self._factors, shares)) % PRIME


def _inverses(values: Sequence[int]) -> list[int]:
    """Computes inverses of numbers modulo PRIME, with one inversion (Montgomery's trick)."""
    products = [1]
    for value in values:
        products.append(products[-1] * value % PRIME)
    inverse = pow(products.pop(), -1, PRIME)
    inverses = []
    for value in reversed(values):
        inverses.append(products.pop() * inverse % PRIME)
        inverse = inverse * value % PRIME
    return inverses[::-1]


def correct(
    points: Sequence[int], shares: Sequence[int], threshold: int
) -> tuple[int, tuple[int, ...]] | None:
    """Recovers a secret although some shares are wrong; returns it with the points of wrong shares.

    Points are positive and distinct, each with a share in [0, PRIME). It succeeds if at most half
    of the shares beyond the threshold are wrong, rounded down; None if no such polynomial exists.
    """
    if len(points) < threshold:
        return None
    # Gao's algorithm: the extended Euclid of ∏ (x - x_i) and of what interpolates all shares,
    # stopped half-way; its remainder is the polynomial times that of the errors.
    remainder, next_remainder = _from_roots(points), _interpolate(points, shares)
    cofactor, next_cofactor = [], [1]
    while 2 * (len(next_remainder) - 1) >= len(points) + threshold:
        quotient, rest = _divide(remainder, next_remainder)
        remainder, next_remainder = next_remainder, rest
        product = _multiply(quotient, next_cofactor)
        cofactor, next_cofactor = next_cofactor, _subtract(cofactor, product)
    polynomial, rest = _divide(next_remainder, next_cofactor)
    if rest or len(polynomial) > threshold:
        return None
    values = [_evaluate(polynomial, point) for point in points]
    wrong = tuple(
        point for point, value, share in zip(points, values, shares, strict=True) if value != share
    )
    if 2 * len(wrong) > len(points) - threshold:
        return None
    return polynomial[0] if polynomial else 0, wrong


# Polynomials are lists of coefficients modulo PRIME, the constant first, the last not zero.


def _evaluate(polynomial: Sequence[int], point: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * point + coefficient) % PRIME
    return value


def _trimmed(polynomial: list[int]) -> list[int]:
    while polynomial and not polynomial[-1]:
        polynomial.pop()
    return polynomial


def _subtract(left: Sequence[int], right: Sequence[int]) -> list[int]:
    size = max(len(left), len(right))
    left = [*left, *[0] * (size - len(left))]
    right = [*right, *[0] * (size - len(right))]
    return _trimmed([(a - b) % PRIME for a, b in zip(left, right, strict=True)])


def _multiply(left: Sequence[int], right: Sequence[int]) -> list[int]:
    product = [0] * (len(left) + len(right) - 1 if left and right else 0)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            product[i + j] += a * b
    return [value % PRIME for value in product]


def _divide(dividend: Sequence[int], divisor: Sequence[int]) -> tuple[list[int], list[int]]:
    rest, inverse = list(dividend), pow(divisor[-1], -1, PRIME)
    quotient = [0] * max(0, len(dividend) - len(divisor) + 1)
    for i in reversed(range(len(quotient))):
        factor = quotient[i] = rest[i + len(divisor) - 1] * inverse % PRIME
        for j, value in enumerate(divisor):
            rest[i + j] = (rest[i + j] - factor * value) % PRIME
    return _trimmed(quotient), _trimmed(rest)


def _from_roots(roots: Sequence[int]) -> list[int]:
    polynomial = [1]
    for root in roots:
        shifted = [0, *polynomial]
        for i, value in enumerate(polynomial):
            shifted[i] = (shifted[i] - root * value) % PRIME
        polynomial = shifted
    return polynomial


def _interpolate(points: Sequence[int], values: Sequence[int]) -> list[int]:
    """Interpolates the polynomial through all points, by Newton's divided differences."""
    differences = list(values)
    for gap in range(1, len(points)):
        spans = [points[i] - points[i - gap] for i in range(gap, len(points))]
        inverses = _inverses(spans)
        for i in reversed(range(gap, len(points))):
            difference = differences[i] - differences[i - 1]
            differences[i] = difference * inverses[i - gap] % PRIME
    polynomial: list[int] = []
    for point, difference in zip(reversed(points), reversed(differences), strict=True):
        shifted = [difference, *polynomial]
        for i, value in enumerate(polynomial):
            shifted[i] = (shifted[i] - point * value) % PRIME
        polynomial = shifted
    return _trimmed(polynomial)
