"""Mistakes in calls of the public names: the type checker must find each line that ends so.

The file is read by a type checker (type_checking_test.py) and never run.
"""

import numpy as np

import tff_dpftrl

schema = tff_dpftrl.MinSep(num_rounds=10, min_sep=5, max_participation=2)  # mistake
schema = tff_dpftrl.MinSep(num_rounds=10, min_sep=5, max_participations="2")  # mistake
schema = tff_dpftrl.MinSep(num_rounds=10, min_sep=5, max_participations=2)
schema.min_seperation  # mistake # noqa: B018

sampler = tff_dpftrl.MinSepSampler(num_clients=100, clients_per_round=10)  # mistake
sampler = tff_dpftrl.MinSepSampler(
    num_clients=100, clients_per_round=10, num_rounds=10, min_sep=5, seed=0
)
sampler.cohort("first")  # mistake
sampler.cohorts(0)  # mistake

strategy = tff_dpftrl.optimise_blt(schema)  # mistake
strategy = tff_dpftrl.optimize_blt(schema)
strategy = tff_dpftrl.optimize_blt(sampler)  # mistake
strategy = tff_dpftrl.build_strategy("blt")  # mistake
strategy = tff_dpftrl.build_strategy("blt", schema)

tff_dpftrl.calibrate_noise_multiplier(strategy, schema, epsilon=8.0, delta=1e-10)  # mistake
z = tff_dpftrl.calibrate_noise_multiplier(strategy, schema, target_epsilon=8.0, delta=1e-10)
z.noise_multiplier  # mistake # noqa: B018

tff_dpftrl.build_dp_ftrl_aggregator(strategy, clip_norm=0.5, clients_per_round=10)  # mistake
tff_dpftrl.build_dp_ftrl_aggregator(
    strategy,
    noise_multiplier=z,
    l2_norm_clip=0.5,  # mistake
    clients_per_round=10,
)
aggregator = tff_dpftrl.build_dp_ftrl_aggregator(
    strategy, noise_multiplier=z, clip_norm=0.5, clients_per_round=10
)
aggregator.guarantee(schema)  # mistake
claim = aggregator.guarantee(schema, delta=1e-10)
claim.eps  # mistake # noqa: B018

tff_dpftrl.NoiseStream(strategy, noise_multiplier=z, clip_norm=0.5)  # mistake
stream = tff_dpftrl.NoiseStream(strategy, noise_multiplier=z, clip_norm=0.5, template=[(3,)])
stream.next()  # mistake

record = tff_dpftrl.ParticipationCounter(100, schema=schema)  # mistake
record = tff_dpftrl.ParticipationCounter(100, declared=schema)
record.add(np.arange(10), when=0)  # mistake
statement = tff_dpftrl.dp_ftrl_statement(claim, unit="device")  # mistake
statement = tff_dpftrl.dp_ftrl_statement(claim, unit_of_privacy="device")
statement.to_html()  # mistake

tff_dpftrl.TrainingConfig(rounds=10)  # mistake
tff_dpftrl.TrainingConfig(num_rounds="10")  # mistake
tff_dpftrl.train("results")  # mistake
tff_dpftrl.runtimes  # mistake # noqa: B018
tff_dpftrl.runtime.servers  # mistake # noqa: B018
tff_dpftrl.execution.compiled()  # mistake
tff_dpftrl.execution.local(threads=4)  # mistake
tff_dpftrl.aggregators.FlatClipping("1")  # mistake
tff_dpftrl.aggregators.CubicClipping(1.0)  # mistake
