"""Checks of a run's privacy statement, and of its metrics."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tff_dpftrl import json_text, version
from tff_dpftrl.accounting import display, privacy_statement, statement_sentences, statement_text
from tff_dpftrl.auditing import audit_report
from tff_dpftrl.auditing.recount import arithmetic, findings, record_checks, records
from tff_dpftrl.auditing.recount import terms as terms_lib
from tff_dpftrl.participation import observed
from tff_dpftrl.runs import manifest, statement_subject

_NO_STATEMENT = "there is no privacy_statement.json: tff-dpftrl report writes it"
_EARLIER = "the run has gone on since its statement was written: tff-dpftrl report writes it again"
_ROWS_RECOUNTED = {terms_lib.DP_FTRL: 8, terms_lib.SAMPLED: 2}  # A row costs seconds if sampled.
_MOST_CLIENTS = 10_000
# Entries and parameters that are computed anew by checks of their own.
_RECOUNTED = frozenset(
    {
        *("epsilon", "delta", "rho_zcdp", "declared", "accounted", "observed"),
        *("sensitivity_squared", "sensitivity_method", "clip_norm", "noise_multiplier"),
        *("num_steps", "num_rounds", "num_steps_charged", "num_rounds_charged", "audits"),
        *("subject", "plain_sentences"),
    }
)
_SHOWN = 160  # Characters of a sentence that a finding quotes.


def _earlier(run: records.Records, terms: terms_lib.Terms) -> bool:
    """Returns whether an unfinished run has begun rounds since its statement was written."""
    if run.ledger is None or run.rounds_done == terms.num_rounds:
        return False
    return (_stated_rounds(run.statement) or 0) < len(run.ledger.rounds)


def _stated_rounds(statement: records.Json) -> int | None:
    """Returns the number of rounds that were run, by the statement."""
    parameters = statement.get("parameters", {})
    observed = statement.get("observed") or {}
    return observed.get("num_rounds", parameters.get("num_steps", parameters.get("num_rounds")))


def _charges_all(run: records.Records, terms: terms_lib.Terms) -> bool:
    """Returns whether all declared rounds are charged, as if the run ended by what the data say."""
    done, budget = run.rounds_done, run.config.get("max_epsilon")
    if done is None:
        done = _stated_rounds(run.statement)
    ended = done == terms.num_rounds
    if not ended and budget is not None:
        following = _declared(run)._replace(rounds=min((done or 0) + 1, terms.num_rounds))
        ended = terms.epsilon(following, terms.delta)[1] > budget
    return not ended or run.config.get("stop_at_accuracy") is not None


def _declared(run: records.Records) -> arithmetic.Schema:
    """Returns the declared participation, by the ledger or else by the statement."""
    if run.declared is not None:
        return arithmetic.Schema(*run.declared)
    once = arithmetic.Schema(1, 1, 1)  # For samples only the number of rounds matters.
    return arithmetic.Schema(*(run.statement.get("declared") or as_json(once)).values())


def _charged(run: records.Records, terms: terms_lib.Terms) -> arithmetic.Schema:
    """Returns the participation that the statement must be computed for.

    It is the declared one, unless the run has ended for a reason that does not depend on data.
    """
    if _charges_all(run, terms):
        return _declared(run)
    rounds, stride, times = run.ledger.observed()
    return arithmetic.Schema(rounds, rounds if stride is None else stride, max(1, times))


def as_json(schema: arithmetic.Schema) -> records.Json:
    """Returns a schema as statements have it."""
    return {
        "num_rounds": schema.rounds,
        "min_sep": schema.stride,
        "max_participations": schema.times,
    }


def participation(test: str, run: records.Records, terms: terms_lib.Terms) -> audit_report.Finding:
    """Checks that the statement is about the participation that the ledger has recorded."""
    if run.statement is None:
        return findings.skipped(test, _NO_STATEMENT)
    if run.ledger is None:
        return findings.skipped(test, record_checks.GONE)
    if _earlier(run, terms):
        return findings.skipped(test, _EARLIER)
    stated, begun = run.statement, len(run.ledger.rounds)
    if terms.kind == terms_lib.SAMPLED:
        parameters = stated["parameters"]
        name = "num_steps" if "num_steps" in parameters else "num_rounds"
        expected = {name: begun, f"{name}_charged": _charged(run, terms).rounds}
        given = {key: parameters.get(key) for key in expected}
    else:
        rounds, stride, times = run.ledger.observed()
        expected = {
            "declared": as_json(arithmetic.Schema(*run.ledger.declared)),
            "observed": as_json(arithmetic.Schema(rounds, stride, times)),
            "accounted": as_json(_charged(run, terms)),
        }
        given = {key: stated.get(key) for key in expected}
    wrong = [
        f"{key} is {given[key]} in the statement and {value} by the ledger"
        for key, value in expected.items()
        if given[key] != value
    ]
    return findings.judged(test, wrong, f"It is that of the {begun} rounds in the ledger")


def sensitivity(test: str, run: records.Records, terms: terms_lib.Terms) -> audit_report.Finding:
    """Checks that the stated sensitivity is that of the strategy, and covers every client."""
    if terms.kind == terms_lib.SAMPLED:
        why = "with sampled cohorts it is 1 by definition"
        if terms.sampling is not None:
            why = "with samples it is part of what ε is recounted from"
        return findings.skipped(test, why)
    if run.statement is None:
        return findings.skipped(test, _NO_STATEMENT)
    parameters = run.statement["parameters"]
    stated, method = parameters["sensitivity_squared"], parameters["sensitivity_method"]
    accounted = run.statement["accounted"]
    schema = arithmetic.Schema(
        accounted["num_rounds"], accounted["min_sep"], accounted["max_participations"]
    )
    strategy = terms.strategy or {"mechanism": "identity"}
    bounds = arithmetic.squared_sensitivity(strategy, schema)
    wrong = []
    if stated < bounds.lower * (1.0 - 1e-9):
        wrong.append(f"S² = {stated:.9g} is stated, and a client can reach {bounds.lower:.9g}")
    if stated > bounds.upper * (1.0 + 1e-9) and "upper bound" not in method:
        wrong.append(f"S² = {stated:.9g} is stated, and no client exceeds {bounds.upper:.9g}")
    of_ledger = ""
    if run.ledger is not None and not _earlier(run, terms):
        most = 0.0
        rounds = max(schema.rounds, len(run.ledger.rounds))
        matrix = arithmetic.strategy_matrix(strategy, rounds)
        patterns = sorted({tuple(turns) for turns in run.ledger.turns().values()}, key=len)
        for turns in patterns[-_MOST_CLIENTS:]:
            most = max(most, float(np.sum(np.square(matrix[:, list(turns)].sum(axis=1)))))
        if most > stated * (1.0 + 1e-9):
            wrong.append(f"a client of the ledger has ‖C u‖² = {most:.9g}, above the stated S²")
        of_ledger = f"; the clients that took part have {most:.9g} at most"
    fine = (
        f"S² = {stated:.9g}, and computed anew it is {bounds.lower:.9g} to {bounds.upper:.9g} "
        f"({bounds.how}){of_ledger}"
    )
    return findings.judged(test, wrong, fine)


def epsilon(test: str, run: records.Records, terms: terms_lib.Terms) -> audit_report.Finding:
    """Checks that ε, δ and ρ follow from noise, sensitivity and charged participation."""
    stated = run.statement
    if stated is None:
        return findings.skipped(test, _NO_STATEMENT)
    parameters = stated["parameters"]
    wrong = []
    if findings.differs(parameters.get("noise_multiplier"), terms.noise_multiplier, 1e-12):
        wrong.append(
            f"the noise multiplier is {parameters.get('noise_multiplier')!r} in the statement and "
            f"{terms.noise_multiplier!r} by the options"
        )
    delta = stated.get("delta") if terms.delta is None else terms.delta
    if stated.get("delta") != delta:
        wrong.append(f"δ is {stated.get('delta')!r} in the statement and {delta!r} by the options")
    wrong += _other_facts(run, parameters)
    if not terms.has_guarantee:
        if stated.get("epsilon") is not None or not stated.get("no_guarantee"):
            wrong.append("a guarantee is claimed, with noise that is missing or not secret")
        return findings.judged(test, wrong, "No guarantee is claimed, and none could be")
    if stated.get("epsilon") is None:
        fine = "No guarantee is claimed, for a reason that the statement gives"
        return findings.judged(test, wrong, fine)
    if terms.kind == terms_lib.SAMPLED:
        charged = parameters.get("num_steps_charged", parameters.get("num_rounds_charged"))
        low, high = terms.epsilon(arithmetic.Schema(charged, 1, charged), delta)
        wrong += _small_deltas(stated.get("profile", ()), terms, charged)
    else:
        inflation = parameters["clip_norm_inflation"]
        if inflation < 1.0:
            wrong.append(f"clip_norm_inflation={inflation!r} would make contributions smaller")
        weights = math.sqrt(parameters["sensitivity_squared"]) * inflation / terms.noise_multiplier
        mu = terms.mu(weights, arithmetic.Schema(*(stated["accounted"]).values()))
        spent = arithmetic.gaussian_epsilon(mu, delta - terms.other_delta) + terms.other_epsilon
        low, high = spent * (1.0 - 1e-6), spent * (1.0 + 1e-6)
        wrong += _small_deltas_of_parts(stated.get("profile", ()), terms, mu)
        if not terms.is_gaussian:
            if stated.get("rho_zcdp") is not None:
                wrong.append("ρ is stated, and parts of the run are no Gaussian mechanisms")
        elif findings.differs(stated.get("rho_zcdp"), mu * mu / 2.0):
            wrong.append(
                f"ρ is {stated.get('rho_zcdp')!r} in the statement, computed {mu**2 / 2!r}"
            )
    if not low <= stated["epsilon"] <= high:
        wrong.insert(
            0, f"ε is {stated['epsilon']!r} in the statement; computed anew {low:.7g} to {high:.7g}"
        )
    if "simulated_epsilon" in parameters:
        low, high = record_checks.epsilon_asked_for(run, terms)
        if not low <= (parameters["simulated_epsilon"] or math.inf) <= high * (1.0 + 1e-2):
            wrong.append(f"the run that is simulated has ε = {low:.6g}, and another one is stated")
    fine = f"{display.epsilon_at(stated['epsilon'], delta)} is what the records come to"
    return findings.judged(test, wrong, fine)


def _small_deltas(
    profile: Sequence[Sequence[float]], terms: terms_lib.Terms, num_rounds: int
) -> list[str]:
    """Lists points (ε, δ) whose δ is smaller than the samples allow: the odds follow from them."""
    if not profile:
        return []
    epsilons = [epsilon - terms.other_epsilon for epsilon, _ in profile]
    if min(epsilons) < 0.0:
        return [f"δ is stated for ε = {profile[0][0]!r}, less than was spent before the first step"]
    deltas = terms.deltas(epsilons, num_rounds)
    return [
        f"δ = {stated!r} is stated for ε = {epsilon!r}, and computed anew it is {delta:.6g}"
        for (epsilon, stated), delta in zip(profile, deltas, strict=True)
        if stated < delta * 0.98 - 1e-12
    ]


def _small_deltas_of_parts(
    profile: Sequence[Sequence[float]], terms: terms_lib.Terms, mu: float
) -> list[str]:
    """Lists points (ε, δ) whose δ is smaller than a Gaussian mechanism and other parts allow."""
    return [
        f"δ = {delta!r} is stated for ε = {epsilon!r}, and the parts of the run have more"
        for epsilon, delta in profile
        if epsilon < terms.other_epsilon
        or delta
        < (terms.other_delta + arithmetic.gaussian_delta(mu, epsilon - terms.other_epsilon))
        * (1.0 - 1e-6)
        - 1e-15
    ]


def _other_facts(run: records.Records, parameters: records.Json) -> list[str]:
    """Lists differences in numbers that the statement copies."""
    clip_norm = run.derived.get("clip_norm", run.config.get("clip_norm"))
    expected = {"num_users": run.num_users}
    if run.config.get("rows_per_owner") is not None:  # All owners, of whom users are the first.
        expected["num_users"] = run.derived["plan"]["num_users"]
    expected |= {
        name: clip_norm for name in ("clip_norm", "initial_clip_norm") if name in parameters
    }
    return [
        f"{name} is {parameters.get(name)!r} in the statement and {value!r} by the records"
        for name, value in expected.items()
        if parameters.get(name) != value
    ]


def other_version(stated: records.Json | None) -> str:
    """Returns the version whose sentences this code does not have; "" if it has them."""
    if stated is None:
        return ""
    has_digest = privacy_statement.DIGEST in (stated.get("subject") or {})
    if has_digest and stated.get("code_version") == version.__version__:
        return ""
    return f"{stated.get('code_version')}{'' if has_digest else ' (before digests)'}"


def text(test: str, run: records.Records) -> audit_report.Finding:
    """Compares the Markdown, line by line, with a fresh rendering of the JSON."""
    if run.statement is None or run.statement_text is None:
        return findings.skipped(test, "one of privacy_statement.md and .json is not there")
    other = other_version(run.statement)
    if other:
        wrong = _other_headline(run.statement, run.statement_text)
        return findings.judged(test, wrong, "", nothing=_not_compared(other, run.statement))
    made = statement_text.markdown(_read(run.statement))
    wrong = _other_lines(run.statement_text.splitlines(), made.splitlines(), "the JSON")
    return findings.judged(test, wrong, "The Markdown is what the JSON makes, line by line")


def _not_compared(other: str, stated: records.Json) -> str:
    numbers = "no ε"
    if stated.get("epsilon") is not None:
        numbers = f"ε = {stated['epsilon']!r} and δ = {stated['delta']!r}"
    return f"written by version {other}: its text is not compared; its numbers are {numbers}"


def _other_headline(stated: records.Json, markdown: str) -> list[str]:
    """Lists differences between ε and δ in the Markdown and in the JSON, of any version."""
    shown = re.search(r"\(ε = ([0-9.e+-]+), δ = ([0-9.e+-]+)\)", markdown)
    if stated.get("epsilon") is None:
        is_refused = shown is None and "No differential privacy guarantee" in markdown
        return [] if is_refused else ["the Markdown claims a guarantee and the JSON none"]
    if shown is None:
        return ["the Markdown does not say (ε = ..., δ = ...)"]
    epsilon, delta = float(shown[1]), float(shown[2])
    wrong = []
    # Rounded up to four digits.
    if not stated["epsilon"] <= epsilon * (1.0 + 1e-12) <= stated["epsilon"] * 1.002 + 1e-300:
        wrong.append(f"ε is {shown[1]} in the Markdown and {stated['epsilon']!r} in the JSON")
    if findings.differs(delta, stated["delta"], 1e-5):
        wrong.append(f"δ is {shown[2]} in the Markdown and {stated['delta']!r} in the JSON")
    return wrong


def _read(stated: records.Json) -> privacy_statement.PrivacyStatement:
    """Reads a statement, whose digests another check compares."""
    about = stated.get("subject") or {}
    plain = {name: value for name, value in about.items() if name not in privacy_statement.DIGESTS}
    made = privacy_statement.PrivacyStatement.from_json(json.dumps({**stated, "subject": plain}))
    return dataclasses.replace(made, subject=about)


def sentences(
    test: str,
    run: records.Records,
    terms: terms_lib.Terms,
    make: Callable[[records.Records, terms_lib.Terms], privacy_statement.PrivacyStatement],
) -> audit_report.Finding:
    """Makes the whole statement again from the records, and compares it entry by entry.

    Numbers are recounted by other checks, with other code; here the code that writes statements
    says again what it has to say of such a run.
    """
    if run.statement is None:
        return findings.skipped(test, _NO_STATEMENT)
    if _earlier(run, terms):
        return findings.skipped(test, _EARLIER)
    other = other_version(run.statement)
    if other:
        return findings.skipped(test, _not_compared(other, run.statement))
    stated = dict(run.statement)
    expected = json_text.parse(statement_text.to_json(make(run, terms)))
    refuted = {statement_sentences.refuted(entry) for entry in stated.get("audits", ())}
    stated["headline_caveats"] = [
        line for line in stated.get("headline_caveats", ()) if line not in refuted
    ]
    opening = list(statement_text.plain(_read(run.statement)))
    wrong = _differences("plain_sentences", stated.get("plain_sentences"), opening)
    compared = sorted(expected.keys() - _RECOUNTED)
    for name in compared:
        wrong += _differences(name, stated.get(name), expected[name])
    wrong += [f"{name} is no entry of a statement" for name in stated.keys() - expected.keys()]
    fine = f"{len(compared)} entries are what the records make; other tests recount the rest"
    return findings.judged(test, wrong, fine)


def subject(
    test: str,
    run: records.Records,
    make: Callable[[], dict[str, str]],
    unknown: Sequence[str] = (),
    *,
    is_bound: bool = False,
) -> audit_report.Finding:
    """Checks that the statement is about the files beside it, and as it was written.

    `unknown` are the entries that no file tells. With `is_bound` it must have digests, which
    statements of earlier versions lack.
    """
    if run.statement is None:
        return findings.skipped(test, _NO_STATEMENT)
    stated = run.statement.get("subject")
    if stated is None and not is_bound:
        return findings.skipped(test, "it is of a version that did not say so")
    stated, also = stated or {}, ", and as it was written"
    expected = make() | statement_subject.digests(run.folder, run.statement)
    if not is_bound and privacy_statement.DIGEST not in stated:
        unknown = [*unknown, *privacy_statement.DIGESTS]
        also = "; it is of a version that bound neither its date nor its version"
    if not (run.folder / "private").exists():
        unknown = [*unknown, *({*statement_subject.KEYED} - expected.keys())]
    written = expected.pop(statement_subject.DATE)
    wrong = [
        f"{name} is {stated.get(name)!r} in the statement and {expected.get(name)!r} by the files"
        for name in sorted((expected.keys() | stated.keys()) - {statement_subject.DATE, *unknown})
        if stated.get(name) != expected.get(name)
    ]
    date = stated.get(statement_subject.DATE)
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", str(date)) or date > written:
        wrong.append(f"its date is {date!r}, which is none, or is yet to come")
    fine = f"It is about the {len(expected.keys() - {*unknown})} files and names beside it{also}"
    return findings.judged(test, wrong, fine)


def made_again(run: records.Records, terms: terms_lib.Terms) -> privacy_statement.PrivacyStatement:
    """Makes the statement of a run by its options and ledger, as `tff-dpftrl report` does."""
    known = manifest.Manifest(
        run.config, run.derived, run.facts, identities={}, recorded_kind=run.public.get("kind")
    )
    if known.kind == manifest.CUSTOM_FINETUNING:
        from tff_dpftrl.finetuning import custom_run as kind
    elif known.kind == manifest.FINETUNING:
        from tff_dpftrl.finetuning import run as kind
    else:
        from tff_dpftrl.training import report as kind
    reportable = kind.reportable(known, run.folder)
    if run.ledger is not None:
        seen = run.ledger.observed()
    else:
        seen_by = run.statement.get("observed") or {}
        seen = (
            _stated_rounds(run.statement) or 0,
            seen_by.get("min_sep"),
            seen_by.get("max_participations", 0),
        )
    return reportable.plan.statement(
        observed.ObservedParticipation(*seen, {}),
        reportable.facts,
        charge_all_rounds=_charges_all(run, terms),
    )


def _differences(name: str, stated: Any, expected: Any) -> list[str]:
    """Lists the lines of an entry of a statement that are not as they are made again."""
    if isinstance(expected, dict) and isinstance(stated, dict):
        return [
            line
            for key in sorted((expected.keys() | stated.keys()) - _RECOUNTED)
            for line in _differences(f"{name}: {key}", stated.get(key), expected.get(key))
        ]
    if isinstance(expected, list) and isinstance(stated, list):
        if all(isinstance(line, str) for line in (*stated, *expected)):
            return _other_lines(stated, expected, "the records", f"{name}, ")
        if len(stated) == len(expected):
            pairs = enumerate(zip(stated, expected, strict=True), start=1)
            return [line for i, both in pairs for line in _differences(f"{name}, line {i}", *both)]
    if isinstance(expected, float) and not findings.differs(stated, expected, 1e-6):
        return []
    if stated == expected and isinstance(stated, bool) == isinstance(expected, bool):
        return []
    return [f"{name} is {_short(stated)} in the statement and {_short(expected)} by the records"]


def _other_lines(
    stated: Sequence[str], expected: Sequence[str], source: str, name: str = ""
) -> list[str]:
    """Lists each line that differs from those made again from `source`, by its number."""
    wrong = []
    matcher = difflib.SequenceMatcher(None, stated, expected, autojunk=False)
    for tag, first, end, other, other_end in matcher.get_opcodes():
        if tag != "equal":
            both = itertools.zip_longest(stated[first:end], expected[other:other_end])
            wrong += [
                f"{name}line {number} is {_line(given)} in the statement, and by {source} "
                f"{_line(made)}"
                for number, (given, made) in enumerate(both, start=first + 1)
            ]
    return wrong


def _line(line: str | None) -> str:
    return "missing" if line is None else _short(line)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"


def metrics_epsilon(
    test: str, run: records.Records, terms: terms_lib.Terms
) -> audit_report.Finding:
    """Checks that the column ε is what the rounds so far have spent under the declared schema."""
    rows = run.metrics
    if not rows:
        return findings.skipped(test, "there is no metrics.csv, or no row in it")
    values = [row.get("epsilon") for row in rows]
    if not terms.has_guarantee:
        wrong = ["it has an ε without a guarantee"] if any(values) else []
        return findings.judged(test, wrong, "There is no guarantee, and no ε in it")
    if run.declared is None and terms.kind == terms_lib.DP_FTRL:
        return findings.skipped(test, record_checks.GONE)
    most = _ROWS_RECOUNTED[terms.kind]
    chosen = sorted(set(np.linspace(0, len(rows) - 1, most).round().astype(int).tolist()))
    declared = arithmetic.Schema(*(run.declared or (1, 1, 1)))
    wrong = []
    for i in chosen:
        try:
            t, shown = int(rows[i]["round"]), float(values[i])
        except (KeyError, TypeError, ValueError):
            wrong.append(f"row {i + 1} has no ε")
            continue
        low, high = terms.epsilon(declared._replace(rounds=t), terms.delta)
        if not low <= shown <= high:
            wrong.append(f"ε after round {t} is {shown:.6g}, computed {low:.6g} to {high:.6g}")
    wrong += [] if wrong else _falls(values)
    fine = f"Computed anew for {len(chosen)} of {len(rows)} rows, between which it never falls"
    return findings.judged(test, wrong, fine)


def _falls(values: Sequence[str | None]) -> list[str]:
    """Lists where the column ε falls: what is spent is never less later on."""
    spent = [float(value or "nan") for value in values]
    return [
        f"ε is {after:.6g} in row {i + 2}, after {before:.6g}"
        for i, (before, after) in enumerate(zip(spent, spent[1:], strict=False))
        if not after >= before * (1.0 - 1e-9)
    ]


def otherwise_published(run: records.Records) -> list[str]:
    """Lists values of `metrics.csv` that are others than in `private/metrics.csv`."""
    wrong = []
    exact, published = run.metrics or [], run.published_metrics or []
    if len(exact) != len(published):
        wrong.append(f"{len(published)} rows are published of {len(exact)} in private/")
    for row, shown in zip(exact, published, strict=False):
        names = [name for name, value in shown.items() if row.get(name) != value]
        wrong += [f"{name} of round {shown.get('round')} is not as in private/" for name in names]
    return wrong


def metrics_rows(test: str, run: records.Records, terms: terms_lib.Terms) -> audit_report.Finding:
    """Checks that rows belong to committed rounds and do not disclose a secret cohort's size."""
    rows, ledger = run.metrics, run.ledger
    if rows is None:
        return findings.skipped(test, "there is no metrics.csv")
    if ledger is None:
        return findings.skipped(test, record_checks.GONE)
    numbers = [row.get("round") for row in rows]
    done = len(ledger.commits)
    wrong = otherwise_published(run)
    # A killed process may have left its last row out; `report` does not write it either.
    complete = [str(t + 1) for t in range(done)]
    if numbers != complete and (done == terms.num_rounds or numbers != complete[:-1]):
        wrong.append(f"{len(numbers)} rows are there of {done} committed rounds, or out of order")
    is_secret = terms.kind == terms_lib.SAMPLED
    for row in rows:
        size, t = row.get("clients"), row.get("round", "")
        if is_secret and size:
            wrong.append(f"row {t} tells the size of a cohort that is secret")
        if size and t.isdigit() and int(t) - 1 in ledger.rounds:
            asked = len(ledger.asked.get(int(t) - 1, ()))
            if size != str(asked):
                wrong.append(f"row {t} has {size} clients, and the ledger {asked}")
    what = (
        "the sizes of cohorts are kept secret" if is_secret else "cohorts have the ledger's sizes"
    )
    fine = f"They are those of the {done} committed rounds; {what}"
    return findings.judged(test, wrong, fine, nothing=not rows and "metrics.csv has no row")
