"""Tests of strategy files: exact round trips, versions, atomic writes, clear errors."""

import json

import numpy as np
import pytest

from tff_dpftrl.mechanisms import (
    banded,
    banded_toeplitz,
    blt,
    certificate,
    dense,
    identity,
    inverse_banded,
    restarts,
    serialization,
    tree,
)
from tff_dpftrl.participation import schema as schema_lib

_SCHEMA = schema_lib.MinSep(8, 3, 2)
_STRATEGIES = {
    "identity": identity.Identity(),
    "blt": blt.Blt([1 - 1e-15, 1 / 3], [1e-9, 0.1]),
    "tree": tree.Tree(8, variance_reduction=False),
    "tree-full": tree.FullTree(),
    "banded": banded.Banded(np.tril(np.ones((8, 3))) + np.tri(8, 3) / 3),
    "banded-toeplitz": banded_toeplitz.BandedToeplitz((1.0, 1 / 3, 0.1)),
    "inverse-banded": inverse_banded.InverseBanded.bisr(3),
    "restarted": restarts.Restarted(blt.Blt([0.9, 1 / 3], [0.2, 0.1]), (0, 3)),
    "dense": dense.Dense(np.tri(8) / 3 + np.eye(8)),
}


@pytest.mark.parametrize("name", _STRATEGIES)
def test_round_trip_is_exact(name, tmp_path):
    strategy = _STRATEGIES[name]
    assert strategy.to_dict()["mechanism"] == name
    claim = certificate.certify(strategy, _SCHEMA)
    path = tmp_path / "strategy.json"
    serialization.save(path, strategy, claim)
    back = serialization.load(path)
    assert type(back) is type(strategy)
    assert back.to_dict() == strategy.to_dict()
    np.testing.assert_array_equal(back.strategy_matrix(8), strategy.strategy_matrix(8))
    if name != "tree-full":  # which is for evaluation only and has no recipe
        assert back.noise_recipe() == strategy.noise_recipe()
    assert serialization.load_certificate(path) == claim
    claim.verify(back)


def test_a_certificate_is_optional():
    text = serialization.strategy_to_json(identity.Identity())
    assert serialization.certificate_from_json(text) is None
    assert isinstance(serialization.strategy_from_json(text), identity.Identity)
    assert json.loads(text)["version"] == serialization.VERSION


_BLT, _RESTARTED = (_STRATEGIES[name].to_dict() for name in ("blt", "restarted"))


def _document(**changes):
    document = json.loads(serialization.strategy_to_json(_STRATEGIES["blt"]))
    document.update(changes)
    return json.dumps({key: value for key, value in document.items() if value is not None})


@pytest.mark.parametrize(
    "text,message",
    [
        ("{", "JSON"),
        ("[1]", "not a strategy"),
        (_document(format="something"), "not a strategy"),
        (_document(version=2), "version 2"),
        (_document(version="1"), "version '1'"),
        (_document(strategy=None), 'no "strategy"'),
        (_document(strategy={"mechanism": "magic"}), "Unknown mechanism 'magic'"),
        (_document(strategy={"mechanism": "banded"}), "needs the parameter 'rows'"),
        (_document(strategy=[1]), "Unknown mechanism None"),
        (_document(strategy={"mechanism": "blt", "buf_decay": [0.5]}), "output_scale"),
        (_document(strategy={**_RESTARTED, "starts": 5}), "'restarted' is wrong"),
        (_document(strategy={**_BLT, "buf_decay": [2, 0.5]}), "between"),
    ],
)
def test_bad_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        serialization.strategy_from_json(text)


class _Own(identity.Identity):
    mechanism = "own"


@pytest.mark.parametrize("strategy", [_Own(), restarts.Restarted(_Own(), (0, 3))])
def test_what_could_not_be_read_again_is_not_written(strategy, tmp_path):
    with pytest.raises(ValueError, match="is a _Own, which nobody could read again"):
        serialization.save(tmp_path / "strategy.json", strategy)
    assert not list(tmp_path.iterdir())


def test_bad_certificate_is_refused():
    with pytest.raises(ValueError, match="certificate"):
        serialization.certificate_from_json(_document(certificate={"luck": 7}))


def test_failed_writes_leave_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "strategy.json"
    serialization.save(path, identity.Identity())
    before = path.read_text()

    broken = {"mechanism": "identity", "value": float("nan")}
    with monkeypatch.context() as patch:
        patch.setattr(identity.Identity, "to_dict", lambda self: broken)
        with pytest.raises(ValueError, match="not JSON compliant"):
            serialization.save(path, identity.Identity())
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["strategy.json"]
    with pytest.raises(ValueError, match="Cannot write"):
        serialization.save(tmp_path / "missing" / "strategy.json", identity.Identity())
    with pytest.raises(ValueError, match="Cannot read"):
        serialization.load(tmp_path / "missing.json")
