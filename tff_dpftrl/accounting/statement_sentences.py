"""Table of the sentences of privacy statements, templates with named fields.

Each sentence must be true of every run whose statement carries it, and say no more than is proven.
A unit is "user", "device" or "example": neighbouring data sets differ in one of them. Whoever takes
part is called by the unit throughout a statement. `statement` and the rooms choose among
them, and fill in the fields: `REFUTED.format(entry=entry)`.

Sentences on samplings are in `participation.sampling`, those in plain words in `statement_text`.
"""

# Names of parameters of a statement, and values of the first one.
NOISE_GENERATOR = "noise_generator"
"""Name of the parameter that says which generator drew the noise, if it was not Philox."""
SECURE_AND_EXACT = "AES-256 in counter mode; Gaussians rounded and added without error"
SECURE_AND_CORRELATED = (
    "AES-256 in counter mode; Gaussians rounded without error, correlated in float64"
)
SECURE_OF_PARTIES = (
    "AES-256 in counter mode; Gaussians rounded without error, rotated in float64 by noise parties"
)
EXPECTED_RUNS = "selection_expected_runs"
"""Name of the parameter that the statement of a run chosen by `sweep --select` has alone."""

# Neighbouring data sets
ZERO_OUT = (
    "Zero-out: neighbouring data sets differ in one {unit} only, whose contributions{zeroed} are "
    "replaced by zeros in every round{apart} (Kairouz et al. 2021, Definition 1.1). Held fixed are "
    "the number of {unit}s, which of them take part in which round, {fixed}, and every seed but "
    "that of the noise: nothing is said about data sets that differ in these."
)
ADAPTIVELY_ZEROED = (
    ", the clipped update and the shifted bit that says whether its norm was below the estimate,"
)
ZERO_OUT_WHEN_SAMPLED = (
    "Zero-out: neighbouring data sets differ in one {unit} only, whose contributions are replaced "
    "by zeros whenever they are sampled{apart}; ε is the larger one of both directions. Held fixed "
    "are the number of {unit}s and the way in which samples are drawn, hence the sampling "
    "probability, {fixed}, and every seed but those of noise and sampling: nothing is said about "
    "data sets that differ in these."
)
ADD_OR_REMOVE = (
    "Beyond that, the same ε holds between data with a {unit} and data without, if the number "
    "of {what}, from which sampling and denominator follow, counts as known: every {unit} is "
    "sampled independently of all others."
)

# Trust, and what is released
FROM_OTHERS = (
    "The protection is from everybody who sees what is released, however much they know of others."
)
FROM_WHOM_UNKNOWN = f"{FROM_OTHERS} What the server sees is said below, under Trust."
IN_ONE_PLACE = (
    "Central differential privacy, with all data in one place: whoever computes is trusted "
    "to run the mechanism as it is written, to keep secret the data, which of it is used, "
    "the sums before noise is added, and the noise with its seed and state."
)
NOT_FROM_OPERATOR = (
    f"{FROM_OTHERS} Whoever runs the training is not among these: they hold all data, and "
    "are trusted to keep it secret."
)
TRUSTED_SERVER = (
    "Central differential privacy: the server is trusted to run the mechanism as it is "
    "written, to keep secret {drawn}what {unit}s send, the sums before noise is added, and "
    "the noise with its seed and state, and to erase them."
)
NOT_FROM_SERVER = FROM_OTHERS + (
    " The server is not among these: it sees what each {unit} sends, and is trusted to keep it "
    "secret."
)
NOT_FROM_WITNESSES = (
    " Nor is the protection from anyone who learns in which rounds you took part, such as "
    "your network provider: the odds below do not apply to them."
)
TRUST_OF_CHOICE = (
    "Whoever runs the sweep is also trusted to keep secret how many runs there were, how long they "
    "took, their scores, and all else of those that were not chosen."
)
OUTPUT = (
    "All noised sums, and what is computed from them without looking at the data again: every "
    "intermediate model and the final one{sent}."
)
OUTPUT_OF_CHOICE = (
    "Of the chosen run alone: its noised sums, and what is computed from them without looking at "
    "the data again: every intermediate model and the final one. Nothing of the other runs, not "
    "even their models on the way."
)

# Who sees a device's report before it is summed
SUMS_ARE_SEEN = (
    "Reports were summed by the server in the clear, without secure aggregation: it is trusted "
    "not to look at single reports, nor to keep them."
)
SECURE_SUMS = (
    "Reports are summed by secure aggregation (Bonawitz et al. 2017), a group's sum being of "
    "{least} devices or more."
)
HIDDEN_FROM_CURIOUS = (
    "Single reports are hidden from a server that keeps to the protocol and reads what it "
    "receives, if no more than {percent} % of a group's devices are in league with it: together "
    "they learn the sum of the group's other devices, and so a report that is the only other one "
    "in it{drawn}"
)
NEIGHBOURS_DRAWN = (
    ", or more with a probability of at most 2^-{bits} in each sum. Each device shares its secrets "
    "with {neighbours} others, drawn at random by the server (Bell et al. 2020); who is in league "
    "with it, and who drops out, must not depend on the draw."
)
SEEN_BY_OTHERS = (
    " A server that does not keep to the protocol can see single reports, by keys of its own in "
    "the place of devices', or by telling devices different things about who dropped out{what}."
)
HIDDEN_FROM_ACTIVE = (
    "Single reports are hidden from a server that may do anything, under three conditions. "
    "First, fewer than a third of a group's devices are in league with it. A device counts "
    "once for each attestation token under which it takes part, and a genuine device may get "
    "many tokens. Second, neither the issuer of these tokens is in league with it, who can "
    "make up devices, nor the holder of the key that signs plans, who can make other plans. "
    "Third, this key has signed no plan for the devices by which reports are seen, since they "
    "take part in every plan that it has signed. The server and the devices in league with it "
    "learn one sum of the group's other devices, and the server can leave some of these out. "
    "What a sum shows of one device is up to the model that the server sends. It sends the "
    "same one to all devices of a group, but may make it for the purpose."
)
HIDDEN_AMONG = (
    "In a group of {least}, with {in_league} of them in league, a report is in one exact sum with "
    "{others}: whoever knows them knows it."
)
HIDDEN_AMONG_NONE = (
    "In a group of {least}, with {in_league} of them in league, a report is alone in what is left "
    "of the sum: it is not hidden."
)
NOT_HIDDEN = (
    "Not hidden are the sums of groups, metrics among them, which are exact and without noise; how "
    "many devices report, drop out and are refused, and when; and the devices' network addresses."
)
NOISED_NOT_HIDDEN = (
    "Not hidden, and without noise, are exact sums of what devices report besides their updates: "
    "metrics, and how often and in which rounds they took part; how many devices report, drop out "
    "and are refused, and when; and the devices' network addresses."
)
A_PARTY = "A noise party, which is another operator without data, adds the noise"
PARTIES = (
    "Each of {number} noise parties, which are other operators without data, adds the whole noise"
)
A_PARTY_PROTECTS = (
    "The noise protects from everybody but the devices and the noise party, which can subtract it "
    "from what is released; from the server, too, unless it colludes with the noise party."
)
PARTIES_PROTECT = (
    "The noise protects from everybody but the devices, the server included, unless all {number} "
    "noise parties collude: together they can subtract it from what is released."
)
NOISE_IN_SUMS = (
    "{parties} within the sum of each round, so that the server sees no updates, and no sums of "
    "updates, without it. {protects} This rests on devices' software, which refuses a sum without "
    "a party whose key is in the signed plan; on the holder of the key that signs plans, who could "
    "sign one without; and on each party's keeping its seed secret, and giving the noise of a "
    "round once, which it records before it sends any. A round whose sum was abandoned after that "
    "is skipped, and counts as one of the rounds that ε is of."
)
TRUST_WITH_PARTIES = (
    "Differential privacy with noise that the server does not know: it need not be trusted with "
    "updates, nor with their sums. It is trusted to keep secret, and to erase, the exact sums of "
    "metrics and participation that it sees."
)
FROM_WHOM_WITH_PARTIES = (
    "It does so however much they know of others. Of metrics and participation the server sees "
    "exact sums, which ε does not cover. All devices of a sum must follow the algorithm: one that "
    "does not can make it wrap around, and then nothing is proven for the others in it. Trust "
    "below has in full on what else this rests."
)
TRUST_WITH_SECURE_SUMS = (
    "Central differential privacy, with secure sums: the server is trusted to run the mechanism as "
    "it is written, to keep secret the sums before noise is added, and the noise with its seed and "
    "state, and to erase them. It need not be trusted with single reports, as far as this goes:"
)
FEW_IN_LEAGUE = "fewer than a third of these devices are in league with it"
CURIOUS_IN_LEAGUE = (
    "it keeps to the protocol, and no more than {percent} % of these devices are in league with it"
)
SERVER_SEES = (
    "The server is not among these: it sees exact sums of what {least} devices or more send, and "
    "is trusted to keep them secret. Of a single device it learns what such a sum tells, and no "
    "more, under the conditions that Trust below has in full: {if_so}, among others. With the most "
    "devices in league, the rest of a sum can be of only {left}. All devices of a sum must follow "
    "the algorithm: one that does not can make it wrap around, and then nothing is proven for the "
    "others in it either."
)
CHOSEN_BY_MODEL = "By the model that it sends it can choose what a sum shows."

# Covered, and not
COVERED = "What the noised sums say about the training data of one {unit}{which}."
CHOICE_COVERED = (
    "The choice of this run among a random number of runs, each with settings drawn at random, by "
    "a score of what they release."
)
FOLLOWING = "{units} that do not follow the algorithm."
FIGURES = "{figures} and A/B tests, and what is decided by them, like the choice of a checkpoint."
TUNING = "Tuning of hyperparameters: {source}."
SETTINGS_TRIED = "Which settings were tried, and what they were chosen on."
VOCABULARY = "Choice of the vocabulary"
VOCABULARY_CHOICE = VOCABULARY + ": {source}."
GROUP_SIZE_CHOICE = (
    "Choice of the group size, {size}: {source}, computed on the training users without noise."
)
POOL_LOOKED_AT = (
    "The comparison of sampling users with sampling examples used the exact size of the pool."
)
OWNERS_OF_ROWS = (
    "Which users own which row, and so which rows were selected to train on: neighbouring data "
    "sets have the same lists of owners, and differ in the content of all rows that name one user, "
    "whoever else they name."
)
DATA_OF_WEIGHTS = "What the initial weights were trained on: {source}."
UNTRAINED = "What was not trained, and has no noise: {untrained}. Computed from: {source}."
TEXT_OF_WEIGHTS = "Text that the initial weights were trained on: {source}."
TEXT_OF_TOKENIZER = "Text that the tokenizer was learned on: not recorded; it is that of {source}."
EXACT_FIGURES = (
    "Loss and accuracy on the training cohorts, the number of users in them and of those whose "
    "update was dropped, how long a round took, the figures about the training data that a run "
    "begins with, and the n-gram baselines counted on it (in private/ and on the terminal only): "
    "exact figures, for simulations; do not publish them."
)
_OF_STEPS = (
    "The loss on the data of a step, how long it took, which grows with them, warnings of "
    "gradients that are not finite"
)
_EXACT = "(in private/ and on the terminal only): exact figures; do not publish them."
EXACT_FIGURES_OF_STEPS = (
    f"{_OF_STEPS}, the figures about the training users' text and the reasons for what was chosen "
    f"that a run begins with, and the n-gram baselines counted on them {_EXACT}"
)
EXACT_FIGURES_OF_OWN_MODEL = f"{_OF_STEPS}, and why a model or its losses were refused {_EXACT}"
EXACT_BESIDE_RELEASED = (
    "What is in private/ and on the terminal: figures of the training data without the noise that "
    "the released ones have; do not publish them."
)
HELD_OUT = (
    "What is measured on the held-out users, who never train and are protected too: exact figures "
    "in private/ and on the terminal, and the choice of private/best_model.npz by them; do not "
    "publish them."
)
EXACT_HELD_OUT = (
    "What is measured on the held-out users without noise, who never train and are protected too: "
    "exact figures in private/ and on the terminal; do not publish them."
)
METRICS_OF_DEVICES = (
    "Metrics of rounds ({metrics}, numbers of devices, durations, sums of the participation "
    "histograms) and of evaluation tasks: exact figures of the devices, without noise. Do not "
    "publish them."
)
ORDER_STATISTICS = (
    "Order statistics of rounds (p10, median and p90 over the devices of {of}), and the histograms "
    "that they are read from: exact figures, without noise. Each is the value of one device, up to "
    "the width of a bucket. Do not publish them."
)

# What else is released, with its noise
_SUMS = (
    "sums in which nobody counts for more than an L2 norm of 1, with independent Gaussian noise of "
    "standard deviation"
)
FIGURES_OF_ROUNDS = f"{{what}}: {_SUMS} {{noise}} in each round"
FIGURES_OF_HELD_OUT = (
    "the same figures of users who are held out by a hash of their id and never train, in "
    f"{{evaluations}} evaluations: {_SUMS} {{noise}} in each"
)
COUNTED_WORDS = (
    "words that were counted, at most {most} of a user, whose weights have an L2 norm of 1: "
    "Gaussian noise of standard deviation {noise} on their sums, and a threshold of {threshold} "
    "(set union, Gopi et al. 2020)"
)
BEST_OF_RUNS = (
    "which of the runs is the best, by {score}: geometric with a mean of {mean:g} runs, {largest} "
    "at most, each with ε = {epsilon} at δ = {delta}"
)

# Accounting
MATRIX_ACCOUNTING = (
    "All rounds together are one Gaussian mechanism with μ = S · clip_norm_inflation / z, hence "
    "ρ-zCDP with ρ = μ² / 2. Its (ε, δ) is exact (Balle & Wang 2018)."
)
ACCOUNTING_OF_CHOICE = (
    "Of the choice: the best of a random number of runs is (ε₀ + 2 ε₁, E[K] δ₀)-DP if each run is "
    "(ε₀, δ₀)-DP and (ε₁, δ₁)-DP with δ₁ = γ (e^ε₁ − 1) / (1 − γ), for a geometric K of mean 1/γ "
    "(Papernot & Steinke 2022; Koskela, Redberg & Wang 2024), cut off at its largest value."
)
OF_ALL_PARTS = {
    "": " ε is of all parts together: squared μ of Gaussian mechanisms add up (Dong et al. 2022)",
    "loss": (
        ", and their loss is convolved with that of the rounds (Zhu, Dong & Wang 2022) or, "
        "where of the rounds ε alone is known, their ε at a tenth of δ is added"
    ),
    "rounds": "; a figure of each round is one Gaussian vector with its update",
    "evaluation": (
        "; the evaluation is of users who never train, none of whom is in another part, and ε "
        "is the larger one of theirs and that of the others"
    ),
    "delta": "; δ of parts is taken from δ first",
    "epsilon": "; ε without a δ is added",
}
"""Clauses of one sentence on the weights and other parts, by what it says more."""
EXAMPLES_OF_A_POOL = (
    "Privacy loss distribution of the mixture of Gaussians N(j, σ²), j ~ Binomial({group_size}, "
    "p), which is tight for one user with at most {examples} in the pool (Charles et al. 2024, "
    "Theorem 3), composed over the steps."
)
SAMPLED_USERS = (
    "Privacy loss distribution of the Poisson-sampled Gaussian mechanism (Charles et al. 2024, "
    "Theorem 2), composed over the steps."
)
GROUP_SIZE_ADDED = " Added to it is ε = {epsilon:g} for the choice of group size."

SAMPLED_ROUNDS = (
    "Privacy loss distribution of the Poisson-sampled Gaussian mechanism, composed over the rounds."
)
OF_SAMPLING = {
    "cyclic": (
        "No two rounds of a group share a row of the banded strategy. So ε is that of one "
        "Poisson-sampled Gaussian for each turn of the group, whose noise is divided by the "
        "largest norm of a column. It is computed by their privacy loss distribution "
        "(Choquette-Choo et al. 2023, Theorem 4). No gain from the secrecy of the groups is "
        "counted."
    ),
    "pool": (
        "No two rounds of a group share a row of the banded strategy. So ε is that of one mixture "
        "of Gaussians N(j, σ²), j ~ Binomial(examples of a user in the pool, sampling "
        "probability), for each turn of the group, whose noise is divided by the largest norm of a "
        "column. It is computed by their privacy loss distribution (Choquette-Choo et al. 2023, "
        "Theorem 4; Charles et al. 2024, Theorem 3). No gain from the secrecy of the groups is "
        "counted."
    ),
    "bins": (
        "The run is dominated by a mixture of as many Gaussians as there are bins, against one "
        "(Choquette-Choo et al. 2024, Lemma 3.2). ε is an upper bound of its own, by the law "
        "of the likelihood ratio of some of the bins, with their correlations raised."
    ),
}
"""Sentences on secret samples with correlated noise, by the kind of the sampling."""
# Assumptions
SCHEMA_KEPT = "Every {unit} keeps to the participation schema accounted for{record}."
NO_SAMPLING = "It is not assumed that who takes part is sampled at random."
SECRET_SAMPLING = "The samples are drawn independently, by a secret generator, and stay secret."
DRAWN_IN_ONE_PLACE = (
    "One party, which holds the data of every {unit}, draws the samples. This guarantee would "
    "not hold for {unit}s in the field: they come when they like, so nobody could draw such "
    "samples of them."
)
DRAWN_EXAMPLES = (
    "At most {examples} of each user were put into a pool, once, at random; every example of the "
    "pool is in a step with probability {chance}, independently of all else."
)
DRAWN_USERS = (
    "Every user is in a step with probability {chance}, independently of all else, with at most "
    "{examples} drawn at random in every step; their mean gradient is clipped."
)
IN_A_COHORT = (
    "Every {unit} is in a round's cohort with probability {chance}, independently of everything "
    "else."
)
IN_A_POOL = "At most {of_client} of each {unit} were put into a pool, once, at random. {drawn}"
SECRET_SEED = (
    "The samples of each {unit} are drawn independently of all other {unit}s and of all data. "
    "Their seed stays secret, and so do the samples."
)
ROWS_NAME_OWNERS = (
    "Every row names all {unit}s whose data stands in it, and each {unit} has one name."
)
EXAMPLE_ONCE = "Every example stands in the data once."
ONE_NAME = "All data of one {unit} is under one name, and no data of another {unit} is there."
ONE_CLIENT = (
    "No {unit} takes part as several {unit}s, and no data of a {unit} is used by another {unit}."
)
NORM_BOUND = (
    "The L2 norm of one {unit}'s contribution to a round is at most {norm} (times "
    "clip_norm_inflation), or, where contributions are encoded before they are summed, the "
    "larger norm that noise_multiplier is relative to."
)
CLIPPED_AS_STATED = "The L2 norm of what is summed is clipped as the parameters say."
CLIPPED_BY_CALLER = (
    "Code outside this package clips and sums, and adds the noise of each round to the sum of that "
    "round and to no other: nothing here has checked it."
)
CLAIMED_BY_AUTHOR = (
    "The mechanism is not one of tff_dpftrl: its sensitivity, and that its noise is of its matrix, "
    "are claims of its author. tff_dpftrl.check_strategy can refute them, and proves nothing."
)
HONEST_DEVICES = (
    "Each device enforces the declared participation by its own timer, which nobody wipes or sets "
    "back, and its software keeps to the signed plan. A device for which this does not hold, "
    "through its own fault or not, is not covered by ε"
)
OTHERS_IN_THE_CLEAR = "; the others are."
OTHERS_IN_A_SECURE_SUM = (
    ". The others are, but for those in a sum with a device that does not clip and encode as the "
    "plan says: it can make the sum wrap around, and nothing is proven of such a sum. In a secure "
    "sum nobody sees whether one does."
)
REPORTED_BY_DEVICES = (
    "The server keeps no list of devices, and cannot check their timers. The observed "
    "participation is what devices report: a report can be false, and can hide another one where "
    "reports are summed securely."
)
CHOICE_SECRET = (
    "The number of runs, how long they took, their scores, and everything that the other runs "
    "computed stay secret. No model of any of them was sent to users while it was trained. A run "
    "whose weights were no longer finite counts as the worst; none failed for another reason that "
    "depends on the data."
)
CONTINUED_ONCE = (
    "No state of the run is continued twice, as by a restored backup or a copied folder: what both "
    "then release is not counted here."
)
SECURE_GENERATOR = (
    "The noise comes from AES-256 in counter mode, which nobody without its key can tell from "
    "random bits."
)
PUBLIC_VOCABULARY = "The vocabulary is of public text: {source}."
NOISED_VOCABULARY = (
    "How text is split into words is public, and so are the words of the vocabulary that were "
    "not counted with noise. The source of all words: {source}."
)

# Caveats
FLOATING_POINT = (
    "The proof is about ideal Gaussians on real numbers. The noise comes from a pseudo-random "
    "generator and floating-point arithmetic, whose gaps are not accounted for (Mironov 2012)."
)
ROUNDED_CORRELATION = (
    "The proof is about noise that is correlated over the rounds without error. Here it is "
    "correlated in float64 and rounded to multiples of 2^-32 of its standard deviation: what that "
    "adds to epsilon, at most what 0.001 standard deviations do for 4 million weights, 2,000 "
    "rounds and a strategy's matrix of norm 40, is not accounted for."
)
ROUNDED_BY_PARTIES = (
    "The proof is about noise without errors. Here each noise party computes and rotates its noise "
    "in float64, and rounds it to the grid of the sum: what these errors add to epsilon is not "
    "accounted for."
)
OTHER_GENERATORS = (
    "The noise of other parts than the weights comes from other generators than AES-256, and from "
    "floating-point arithmetic, whose gaps are not accounted for (Mironov 2012)."
)
COUNTED = (
    "{what}, {number}, determines the sampling probability. It was counted on the data and is "
    "treated as public{remedy}."
)
DECLARED_USERS = "The number of users, {number}, is stated as it was counted."
DEFAULT_DELTA = (
    "δ is n^-1.1 for the {number} examples of all users, a number that is treated as public."
)
PERSON_WITH_SEVERAL = (
    "A person with several {unit}s is protected less: by group privacy over those {unit}s."
)

# Caveats right under the headline
SIMULATION = (
    "Simulation: its noise is scaled down with its cohorts. With the noise of this one, {promise}; "
    "the users of this simulation have only the ε above."
)
WHAT_IF = (
    "What if: with {scale:g} times as many users, {users:g}, and the same expected batch, the "
    "noise would give ε = {epsilon} at δ = {delta}. This is a comparison, not a guarantee for "
    "anybody in this data."
)
REFUTED = "An audit has refuted this claim, so nobody should rely on it: {entry}."
AUTHORS_SENSITIVITY = (
    "ε follows from a sensitivity that the author of the mechanism {mechanism!r} claims: see "
    "the assumptions."
)
CONTRADICTING_DEVICES = (
    "Devices contradict the declared participation ({breaches}): {reports}. Software that keeps to "
    "the plan sends none, so ε is of the declared participation. If these reports were true, ε "
    "would be {epsilon} for the devices that sent them."
)
UNKNOWN_ROUNDS = (
    "The participation histograms of {rounds} add up to what no devices can report: they show "
    "nothing of who took part. ε is of the declared participation. At worst, for a device that "
    "took part in all of these rounds, ε would be {epsilon}."
)
PRIVATE_VOCABULARY = (
    "The words of the vocabulary were counted on protected users without noise: which words the "
    "model knows is not covered."
)
NOISED_ELSEWHERE = (
    "Words of the vocabulary were counted with noise on users whom another run protects: its "
    "statement covers which words these are, and what both say of the same people adds up."
)
OTHER_TASKS = "The devices also take part in the training of: "
"""Beginning of a sentence on the other tasks of a population."""
INITIAL_WEIGHTS = (
    "The initial weights are of a model that may have been trained on the same people: what it "
    "tells of them comes on top of epsilon."
)
BEGAN = "The initial weights are of the run "
NOTHING_TOGETHER = "nothing is promised for all together."
NOT_ALL = f"all of these have a guarantee: {NOTHING_TOGETHER}"
OF_SEVERAL_UNITS = (
    "Some of these runs protect single examples, others all that is of a user or device: "
    f"{NOTHING_TOGETHER}"
)
WHO_IS_IN_ALL = {
    True: "All of these runs trained on the same users. For all of them together",
    False: (
        "The runs have other users, some of whom may be in several. For who is in all of these runs"
    ),
    None: (
        "Whether they trained on the same {units} is not known. For {who_is} in all of these runs"
    ),
}
"""Beginnings of a sentence on a run and those that its weights come from, by `same_users`."""
ONE_OF_A_CHOICE = (
    "Nothing of this run is to be published: it is one of the runs that sweep --select chooses "
    "among, and the epsilon of the choice covers only what is released in winner/."
)
"""Headline caveat of each run of `sweep --select`; the statement of the chosen one is without."""
CHOICE_AMONG_RUNS = (
    "Every epsilon is that of one run by itself: choosing among runs by their accuracy on held-out "
    "users is not covered by any of them, and whoever sees several runs on the same people learns "
    "more than one epsilon says."
)
_PUBLISHING = "publishing all data of one drawn at random would meet this δ, with ε = 0"
LARGE_DELTA_OF_UNKNOWN = (
    "δ = {delta} is large and the number of {unit}s is not recorded: with "
    f"{{enough}} {{unit}}s or more, {_PUBLISHING}."
)
DELTA_PROTECTS_NOBODY = (
    f"δ = {{delta}} is not below 1 / {{users}}, one over the {{unit}}s: {_PUBLISHING}."
)
DELTA_TIMES_USERS = (
    "δ = {delta} times the {users} {unit}s is {expected}: publishing all data of each with "
    "probability δ would meet this δ, with ε = 0, and publishes somebody's with probability "
    "{somebody}. Choose a δ below {below}."
)

# Why there is no guarantee
NO_NOISE = "No noise was added (noise_multiplier is 0)."
TOO_LITTLE_NOISE = "No noise was added, or too little for any finite epsilon."
KNOWN_SEED = (
    "The noise was drawn from a seed given by the user: whoever knows or guesses it can subtract "
    "the noise."
)
BROKEN_SCHEMA = "The participation broke the schema {name}: {breach}."
