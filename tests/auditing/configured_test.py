"""What a config would run is audited: consistent for correct ones of every kind."""

import math

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.auditing import planted_bugs
from tff_dpftrl.auditing import audit_report, configured, probes
from tff_dpftrl.auditing import claim as claim_lib
from tff_dpftrl.private_round import aggregation, clipping, fixed_clip
from tff_dpftrl.runtime.tasks import task_config
from tff_dpftrl.training import config as config_lib

_COMMON = {"num_rounds": 20, "clients_per_round": 40, "noise_multiplier": 2.0}
_RESTARTS = {"adaptive_clipping": True, "restart_warmup": 5, "restart_every": 8}
_NUM_CLIENTS = 400
# Chance that a correct config is called violated in a test: noise and coins have no seeds here.
_ERROR_RATE = 1e-3


def _audit(**options):
    config = config_lib.TrainingConfig.of(**(_COMMON | options))
    return configured.audit_config(
        config, num_clients=_NUM_CLIENTS, trials=1000, error_rate=_ERROR_RATE
    )


def test_a_config_that_promises_nothing_is_refused():
    config = config_lib.TrainingConfig.of(mechanism="none", clients_per_round=10)
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
        {"algorithm": "dp-fedsgd", "per_layer_clipping": True},
    ],
    ids=str,
)
def test_correct_configs_are_consistent(options):
    report = _audit(**options)
    assert not report.is_violated, report.verdict
    totals = {one.what: one.total for finding in report.findings for one in finding.covers}
    kinds = {"rounds": 20, "tensors": 6, "training rounds": 20, "training tensors": 6}
    assert totals == kinds
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
    config = task_config.TaskConfig.of(
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


def _plant(monkeypatch, kind=fixed_clip.FixedClipRound, noise=1.0):
    """Makes configs be run with private rounds of a kind, with this share of the noise."""

    def planted(options, plan):
        private_round = kind(
            plan.strategy,
            noise_multiplier=noise * plan.noise_multiplier,
            clipping=clipping.FlatClipping(plan.clip_norm),
            clients_per_round=plan.clients_per_round,
        )
        return aggregation.Aggregation(private_round)

    monkeypatch.setattr(configured.process, "build_aggregation", planted)


def _without_training(*args, **options):
    return audit_report.AuditReport("no training", claim_lib.Claim(1.0, 1e-6), (), is_ours=True)


def _violated(report):
    return [finding.test for finding in report.findings if finding.outcome == "violated"]


_ROUNDS_PLAYED = 5


@pytest.mark.parametrize(
    "kind, test",
    [
        (planted_bugs.NoNoiseOnFourthLater, "noise of a run without clients: "),
        pytest.param(
            planted_bugs.NoNoiseOnMatrices, "noise: standard deviation", marks=pytest.mark.slow
        ),
        pytest.param(
            planted_bugs.NoNoiseOnFourth, "noise: standard deviation", marks=pytest.mark.slow
        ),
        pytest.param(
            planted_bugs.OnlyFirstTwoClipped, "what one client adds", marks=pytest.mark.slow
        ),
    ],
)
def test_faults_of_some_tensors_and_of_late_rounds_are_found(monkeypatch, kind, test):
    config = config_lib.TrainingConfig.of(**_COMMON, mechanism="blt")
    _plant(monkeypatch, kind)
    monkeypatch.setattr(configured, "_short_run", _without_training)
    monkeypatch.setattr(probes, "_GRID", (1.5, 10.0))  # It takes most of the time.
    report = configured.audit_config(
        config,
        num_clients=_NUM_CLIENTS,
        trials=200,
        rounds=_ROUNDS_PLAYED,
        error_rate=_ERROR_RATE,
    )
    assert any(name.startswith(test) for name in _violated(report)), report.to_markdown()
    if kind is planted_bugs.NoNoiseOnFourthLater:  # Else nothing is wrong.
        also = "a round executed again from its state"  # A tensor without noise is the same.
        assert all(name.startswith((test, also)) for name in _violated(report))
    covers = {str(one) for finding in report.findings for one in finding.covers}
    assert {"rounds 1 to 5 of 20", "all 20 rounds", "all 6 tensors"} <= covers
    assert "6 small tensors of ranks 1, 2" in report.subject


@pytest.mark.slow
def test_a_fault_of_the_learning_process_that_begins_late_is_found(monkeypatch):
    config = config_lib.TrainingConfig.of(**_COMMON | {"num_rounds": 90}, mechanism="blt")
    _plant(monkeypatch, planted_bugs.NoNoiseLater)
    monkeypatch.setattr(configured.aggregator_lib, "audit_aggregator", _without_training)
    report = configured.audit_config(config, num_clients=_NUM_CLIENTS, error_rate=_ERROR_RATE)
    assert _violated(report) == ["training: canaries as trials, single rounds"]
    (found,) = (one for one in report.findings if one.outcome == "violated")
    assert found.says.startswith("Of 3 rounds played alone, round 90:")
    assert str(found.covers[0]) == "training rounds 64, 65 and 90 of 90"
    # Of the first 60 rounds canaries are in every tenth.
    assert "no test looked at 81 of 90 training rounds" in report.headline


def test_rounds_are_played_alone_around_powers_of_two_and_restarts_and_at_the_end():
    assert configured._later_rounds((0,), 20, 10) == [15, 16, 19]
    assert configured._later_rounds((0,), 60, 59) == []
    most = configured._later_rounds((0,), 10**6, 900)
    assert most == [1023, 1024, 1999]  # Later ones would take minutes.
    options = _COMMON | {"num_rounds": 100, "mechanism": "blt", **_RESTARTS}
    starts = config_lib.TrainingConfig.of(**options).privacy.starts(100)
    assert configured._later_rounds(starts, 100, 59) == [60, 61, 63, 64, 92, 93, 99]


def test_what_else_is_released_counts_as_not_tested(monkeypatch):
    monkeypatch.setattr(configured, "_short_run", _without_training)
    monkeypatch.setattr(configured.aggregator_lib, "audit_aggregator", _without_training)
    options = _COMMON | {"noise_multiplier": None, "target_epsilon": 8.0, "mechanism": "blt"}
    config = config_lib.TrainingConfig.of(**options, vocabulary="dp", metrics_epsilon=0.5)
    report = configured.audit_config(config, num_clients=_NUM_CLIENTS)
    assert [(one.test, one.outcome) for one in report.findings] == [
        ("release of the vocabulary", "not tested"),
        ("release of the training metrics", "not tested"),
    ]
    assert all("the updates alone" in one.says for one in report.findings)


def test_an_update_has_the_tensors_of_the_config_s_model():
    config = config_lib.TrainingConfig.of(**_COMMON, model="gboard-cifg")
    shapes = configured._shapes(config)
    assert [len(shape) for shape in shapes] == [2, 2, 2, 1, 2, 1, 2]
    assert {math.prod(shape) for shape in shapes} == {680}
    custom = configured._shapes(config_lib.TrainingConfig.of(**_COMMON, model="own"))
    assert [len(shape) for shape in custom] == [1, 2]


@pytest.mark.slow
def test_a_config_that_draws_too_little_noise_is_caught(monkeypatch):
    config = config_lib.TrainingConfig.of(**_COMMON, mechanism="blt")
    _plant(monkeypatch, noise=0.25)
    report = configured.audit_config(config, num_clients=_NUM_CLIENTS, trials=1000)
    violated = _violated(report)
    assert "distinguishing game, likelihood ratio" in violated
    assert any(test.startswith("training: canaries as trials") for test in violated)
