"""The demonstration for users of TFF trains with both aggregators, at the same ε."""

import types

import dp_accounting
import pytest
from dp_accounting import pld

tff = pytest.importorskip("tensorflow_federated", reason="trains with TFF's algorithms")

import tff_dpftrl  # noqa: E402
from experiments import tff_demo  # noqa: E402
from tff_dpftrl.data import docstrings, user_text  # noqa: E402

_TINY = tff_demo.Size(
    vocabulary_size=20,
    sequence_length=2,
    embedding_size=4,
    state_size=4,
    num_rounds=3,
    clients_per_round=2,
)


_WORDS = "Returns the sum of all values of an array, and the number of them.".split()


def _text() -> user_text.UserText:
    texts = {f"module{i}": [" ".join(_WORDS[i % 5 :])] for i in range(30)}
    return user_text.UserText("modules", "one module", tuple(texts), texts.__getitem__)


def test_both_train_and_the_statement_has_their_epsilon(capsys, monkeypatch):
    monkeypatch.setattr(docstrings, "read", _text)
    monkeypatch.setattr(docstrings, "read_standard_library", lambda **_: _text())
    # Other tests of the process may have started TensorFlow.
    monkeypatch.setattr(tff_dpftrl.execution, "limit_operation_threads", lambda clients: None)
    accuracies = tff_demo.run(_TINY, seed=0)
    assert list(accuracies) == ["before training", tff_demo.GAUSSIAN, tff_demo.BLT]
    assert len(set(accuracies.values())) > 1 and all(0 <= a <= 1 for a in accuracies.values())
    printed = capsys.readouterr().out
    assert "max_participations=1" in printed and "ε = 8" in printed
    for name, accuracy in accuracies.items():
        assert f"{name:<20}{accuracy:.2%}" in printed


def test_the_noise_of_tff_is_for_all_rounds_of_a_user(monkeypatch):
    schema = tff_dpftrl.MinSep(num_rounds=6, min_sep=3, max_participations=2)
    sampler = types.SimpleNamespace(schema=schema, clients_per_round=2)
    factory = tff.aggregators.DifferentiallyPrivateFactory
    monkeypatch.setattr(factory, "gaussian_fixed", lambda *arguments: arguments)
    z, *others = tff_demo.gaussian(types.SimpleNamespace(sampler=sampler))
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(z), 2)
    spent = pld.PLDAccountant().compose(event).get_epsilon(tff_demo.DELTA)
    assert spent == pytest.approx(tff_demo.EPSILON, rel=1e-5)
    assert others == [2, tff_demo.CLIP_NORM]
