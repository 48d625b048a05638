"""What a config would run is audited: consistent for correct ones of every kind."""

import sys

import pytest

pytest.importorskip("tensorflow_federated", reason="audits processes of TFF")

from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl.auditing import configured
from tff_dpftrl.runtime.tasks import task_config
from tff_dpftrl.training import config as config_lib

_COMMON = {"num_rounds": 20, "clients_per_round": 40, "noise_multiplier": 2.0}
_RESTARTS = {"adaptive_clipping": True, "restart_warmup": 5, "restart_every": 8}
_NUM_CLIENTS = 400
# Chance that a correct config is called violated in a test: noise and coins have no seeds here.
_ERROR_RATE = 1e-3


def _audit(**options):
    config = config_lib.TrainingConfig(**(_COMMON | options))
    return configured.audit_config(
        config, num_clients=_NUM_CLIENTS, trials=1000, error_rate=_ERROR_RATE
    )


def test_a_config_that_promises_nothing_is_refused():
    config = config_lib.TrainingConfig(mechanism="none", clients_per_round=10)
    with pytest.raises(ValueError, match="config promises nothing"):
        configured.audit_config(config, num_clients=100)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"mechanism": "blt", "server_optimizer": "adam"},
        {"mechanism": "tree", "server_optimizer": "momentum", "deterministic_noise_seed": 7},
        {"mechanism": "bandmf", "bands": 4, "secagg_bits": 18},
        {"mechanism": "blt", **_RESTARTS},
        {"mechanism": "blt", "secagg_bits": 18, **_RESTARTS},
        {"algorithm": "dp-fedavg"},
        {"algorithm": "dp-fedavg", "sampling": "cyclic", "mechanism": "bandtoep", "bands": 4},
        {"algorithm": "dp-fedavg", "sampling": "bins", "mechanism": "blt"},
        {"algorithm": "dp-fedavg", "sampling": "b-min-sep", "mechanism": "bandtoep", "bands": 4},
        {"algorithm": "dp-fedsgd", "per_layer_clipping": True},
    ],
    ids=str,
)
def test_correct_configs_are_consistent(options):
    report = _audit(**options)
    assert not report.is_violated, report.verdict
    assert report.is_ours and report.confidence >= 1.0 - _ERROR_RATE - 1e-9
    assert report.epsilon_at_least < report.claim.epsilon
    # Of secret samples a short run proves next to nothing.
    assert report.epsilon_at_least > 0.0 or "algorithm" in options
    tests = [finding.test for finding in report.findings]
    assert any(test.startswith("distinguishing game") for test in tests)
    assert any(test.startswith("training: one-run bound") for test in tests)


@pytest.mark.slow
def test_noise_parties_of_a_task_are_audited():
    key = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    config = task_config.TaskConfig(
        **_COMMON,
        mechanism="blt",
        secagg_bits=20,
        population="audit",
        num_devices=_NUM_CLIENTS,
        secure_aggregation="honest-but-curious",
        noise_party=key.hex(),
    )
    report = configured.audit_config(
        config, num_clients=_NUM_CLIENTS, trials=200, error_rate=_ERROR_RATE
    )
    assert not report.is_violated, report.verdict
    assert report.confidence >= 1.0 - _ERROR_RATE - 1e-9
    assert sum(finding.test.startswith("secure sum: ") for finding in report.findings) == 3


@pytest.mark.slow
def test_a_config_that_draws_too_little_noise_is_caught(monkeypatch):
    build = configured.process.build_aggregator
    config = config_lib.TrainingConfig(**_COMMON, mechanism="blt")

    def little_noise(options, plan):
        aggregator = build(options, plan)
        aggregator.private_round = type(aggregator.private_round)(
            plan.strategy,
            noise_multiplier=plan.noise_multiplier / 4,
            clipping=aggregator.private_round.clipping,
            clients_per_round=plan.clients_per_round,
            deterministic_seed=None,
        )
        return aggregator

    plan = config.privacy().plan(_NUM_CLIENTS, 100)
    correct = build(config.learning, plan)
    claim = correct.guarantee(plan.schema, plan.delta)
    monkeypatch.setattr(configured.process, "build_aggregator", little_noise)
    monkeypatch.setattr(type(correct), "guarantee", lambda self, schema, delta: claim)
    report = configured.audit_config(config, num_clients=_NUM_CLIENTS, trials=1000)
    violated = [finding.test for finding in report.findings if finding.outcome == "violated"]
    assert "distinguishing game, likelihood ratio" in violated
    assert any(test.startswith("training: canaries as trials") for test in violated)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
