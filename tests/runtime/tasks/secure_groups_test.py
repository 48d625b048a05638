"""Tests of the options of secure aggregation: what follows from them, and which are refused."""

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tff_dpftrl.runtime import signing_keys
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.plans import plan_pb2
from tff_dpftrl.runtime.tasks import task_config
from tff_dpftrl.secure_sums import parameters, vectors

_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key().public_bytes_raw().hex()
_CURIOUS, _ACTIVE = "honest-but-curious", "active-server"
_GIVEN = {
    "population": "keyboard",
    "num_devices": 3000,
    "num_rounds": 50,
    "clients_per_round": 100,
    "noise_multiplier": 1.0,
    "secagg_bits": 20,
    "secure_aggregation": _CURIOUS,
}


def _config(**changes):
    return task_config.TaskConfig.of(**(_GIVEN | changes))


def test_a_plan_demands_what_the_options_say():
    assert _config(secure_aggregation=None).secure_groups is None
    assert _config().secure_groups.demanded(130) == plan_pb2.SecureAggregation(
        threat_model=plan_pb2.SecureAggregation.HONEST_BUT_CURIOUS,
        least_devices=80,
        most_devices=130,
    )
    active = _config(secure_aggregation=_ACTIVE, least_group=20, devices_per_aggregator=50)
    assert active.secure_groups.demanded(130) == plan_pb2.SecureAggregation(
        threat_model=plan_pb2.SecureAggregation.ACTIVE_SERVER, least_devices=20, most_devices=130
    )
    large = _config(clients_per_round=1000, devices_per_aggregator=1300, secure_neighbours=150)
    assert large.secure_groups.demanded(130).least_neighbours == 150


def test_the_least_group_is_its_share_of_the_least_reports_and_is_kept():
    assert _config().resolved("nwp").sums.least_group == 80
    thirds = _config(devices_per_aggregator=50)  # 130 devices in three groups.
    assert thirds.resolved("nwp").sums.least_group == 26
    assert _config(least_group=5).resolved("nwp").sums.least_group == 5
    assert _config(secure_aggregation=None).resolved("nwp").to_dict()["least_group"] is None
    resolved = thirds.resolved("nwp")
    assert task_config.TaskConfig.of(**resolved.to_dict()) == resolved
    smaller = resolved.changed(least_group=3)
    assert smaller.resolved("nwp").sums.least_group == 3


@pytest.mark.parametrize("clients_per_round", [10, 20, 99, 100])
@pytest.mark.parametrize("over_selection", [1.0, 1.1, 1.3])
@pytest.mark.parametrize("least_fraction", [0.8, 1.0])
def test_a_round_has_as_many_groups_as_the_options_say(
    clients_per_round, over_selection, least_fraction
):
    config = _config(
        clients_per_round=clients_per_round,
        over_selection=over_selection,
        least_fraction=least_fraction,
        devices_per_aggregator=11,
    )
    demanded = parameters.Parameters(
        (vectors.Segment(1, 2),),
        parameters.ThreatModel.HONEST_BUT_CURIOUS,
        config.secure_groups.least_group,
        most_devices=config.round_settings.wanted,
    )
    wanted = config.round_settings.wanted
    task = population.Task("nwp", config.round_settings, None, None, secure_sum=demanded)
    assert task.num_groups(wanted) == -(-wanted // config.serving.devices_per_aggregator)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"secure_aggregation": "nobody"}, "secure_aggregation must be"),
        ({"secagg_bits": None}, "secure_aggregation='honest-but-curious' .* give secagg_bits"),
        ({"secagg_bits": 8}, "secagg_bits=8 has no room .* 130 devices .* raise it to 9"),
        (
            {"secure_aggregation": None, "least_group": 5},
            "least_group has no meaning with reports in",
        ),
        (
            {"secure_aggregation": None, "secure_threshold": 0.7},
            "secure_threshold has no meaning with",
        ),
        ({"secure_threshold": 0.4}, "secure_threshold=0.4 must be a half or more"),
        ({"secure_threshold": 1.0}, "below 1"),
        ({"secure_aggregation": _ACTIVE, "secure_threshold": 0.6}, "must be two thirds or more"),
        ({"least_group": 1}, "least_group must be at least 2"),
        ({"least_group": 101}, "least_group=101 is above the 100 devices that report"),
        (
            {"least_group": 34, "devices_per_aggregator": 50},
            "least_group=34 is above the 33 .* each of 3 groups",
        ),
        (
            {"clients_per_round": 1000, "devices_per_aggregator": 1300},
            "groups of 1300, .*or give secure_neighbours",
        ),
        (
            {
                "clients_per_round": 1000,
                "devices_per_aggregator": 1300,
                "secure_aggregation": _ACTIVE,
            },
            "shares secrets with every other one: lower devices_per_aggregator.$",
        ),
        (
            {"secure_aggregation": _ACTIVE, "secure_neighbours": 50},
            "an active server may draw what suits it",
        ),
        ({"secure_neighbours": 49}, "must be even"),
        ({"secure_neighbours": 80}, "must be below least_group=80"),
        (
            {
                "clients_per_round": 1000,
                "devices_per_aggregator": 1300,
                "secure_neighbours": 10,
            },
            r"secure_neighbours=10 in groups of 1300 .* 2\*\*-40.* raise it to \d+\.",
        ),
        (
            {"devices_per_aggregator": 2},
            "least_group=2 is above the 1 .*: no group has fewer than 2: raise devices_per_agg",
        ),
        ({"secure_step_timeout": 0.0}, "secure_step_timeout must be"),
        (
            {"secure_aggregation": None, "noise_party": _KEY},
            "noise_party has no meaning with reports in the clear, but with secure_agg",
        ),
        ({"noise_party": f"{_KEY}, {_KEY.upper()}"}, f"noise_party has the key {_KEY[:16]} twice"),
        # No point of the curve; and one of small order, for which anybody can sign.
        (
            {"noise_party": _KEY + ",02" + "00" * 31},
            "noise_party has 0200*, which is no public key of",
        ),
        ({"noise_party": "01" + "00" * 31}, "noise_party has 0100*, which is no public key of Ed"),
        ({"noise_party": "no_such.pub"}, "noise_party='no_such.pub' names no key: There is no"),
        (
            {"noise_party": ",".join(f"{i:064x}" for i in range(9))},
            "noise_party names 9 parties, and each adds the whole noise: name 8 at most",
        ),
        (
            {"noise_party": _KEY, "devices_per_aggregator": 50},
            "one group a round, .*=50 makes 3 of 130 devices: raise it to 130.$",
        ),
        (
            {"noise_party": _KEY, "clients_per_round": 1000},
            "makes 3 of 1300 devices: raise it to 1300, with secure_neighbours.$",
        ),
        (
            {"noise_party": _KEY, "clients_per_round": 4000, "num_devices": 99_999},
            "clients_per_round=4000 .* choose 5200 devices: lower one of these until it is 5000",
        ),
        (
            {"noise_party": _KEY, "mechanism": "none", "noise_multiplier": None},
            "mechanism 'none'",
        ),
        (
            {"secure_neighbours": 50, "secure_corrupt_fraction": 1.5},
            "secure_corrupt_fraction must be .* below 1, got 1.5",
        ),
        (
            {"secure_corrupt_fraction": 0.1},
            "secure_corrupt_fraction=0.1 is what secure_neighbours are enough for, and there are",
        ),
        (
            {"secure_aggregation": None, "secagg_bits": None, "secure_corrupt_fraction": 0.1},
            "secure_corrupt_fraction has no meaning with reports in the clear",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        _config(**changes)
    assert "\n" not in str(caught.value)


def test_noise_parties_are_named_by_their_keys(tmp_path):
    key = signing_keys.create(tmp_path / "party").public_key().public_bytes_raw()
    config = _config(noise_party=f"{tmp_path / 'party.pub'},{_KEY}")
    assert config.noise_parties == (key.hex(), _KEY)
    assert config.secure_groups.demanded(130).noise_parties == [key, bytes.fromhex(_KEY)]
    assert config.secure_groups.noise_parties == (key.hex(), _KEY)
    # The task's folder needs no file of another machine.
    assert config.resolved("nwp").sums.noise_party == f"{key.hex()},{_KEY}"
    plain = _config().secure_groups
    assert not plain.noise_parties and "noise_parties" not in plain.to_dict()


def test_neighbours_are_enough_for_all_drop_outs_that_a_group_outlasts():
    options = {"clients_per_round": 1000, "devices_per_aggregator": 1300, "secure_neighbours": 50}
    assert _config(**options).secure_groups.least_group == 800
    with pytest.raises(ValueError, match="all but least_group=300 drop out: raise it to"):
        _config(**options, least_group=300)
    with pytest.raises(ValueError, match="all but least_group=60 drop out: raise least_group, or"):
        _config(**options, least_group=60)


def test_the_remedy_of_too_few_neighbours_helps():
    options = {"clients_per_round": 1000, "devices_per_aggregator": 1300}
    with pytest.raises(ValueError, match="raise it to") as caught:
        _config(**options, secure_neighbours=10)
    enough = int(str(caught.value).rsplit(" ", 1)[1].removesuffix("."))
    assert _config(**options, secure_neighbours=enough).sums.secure_neighbours == enough
    with pytest.raises(ValueError, match=f"raise it to {enough}"):
        _config(**options, secure_neighbours=enough - 2)
