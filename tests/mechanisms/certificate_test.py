"""Tests of certificates."""

import dataclasses

import pytest

from tff_dpftrl.mechanisms import blt, certificate
from tff_dpftrl.participation import schema as schema_lib

_SCHEMA = schema_lib.MinSep(100, 20, 3)


def test_it_states_what_the_strategy_says():
    strategy = blt.Blt([0.9], [0.4])
    claim = certificate.certify(strategy, _SCHEMA)
    assert claim.schema == _SCHEMA
    assert claim.sensitivity == strategy.sensitivity(_SCHEMA).value
    assert claim.sensitivity_exact
    assert claim.max_loss == pytest.approx(strategy.max_loss(_SCHEMA))
    assert claim.rms_loss == pytest.approx(strategy.rms_loss(_SCHEMA))
    assert certificate.Certificate.from_dict(claim.to_dict()) == claim
    claim.verify(strategy)


def test_false_claims_are_found():
    strategy = blt.Blt([0.9], [0.4])
    claim = certificate.certify(strategy, _SCHEMA)
    flattering = dataclasses.replace(claim, sensitivity=claim.sensitivity * (1 - 1e-6))
    with pytest.raises(ValueError, match="claims sensitivity"):
        flattering.verify(strategy)
    with pytest.raises(ValueError, match="claims"):
        dataclasses.replace(claim, sensitivity_exact=False).verify(strategy)
    with pytest.raises(ValueError, match="claims"):
        claim.verify(blt.Blt([0.9], [0.41]))


def test_a_bound_is_marked_as_such():
    claim = certificate.certify(blt.Blt([0.9], [2.0]), _SCHEMA)
    assert not claim.sensitivity_exact
    assert "bound" in claim.sensitivity_method
