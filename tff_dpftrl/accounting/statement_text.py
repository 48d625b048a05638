"""Renders privacy statements: as Markdown, as JSON, and in plain words for those without ε.

Five sentences for readers who have never heard of ε open a statement. Each of them must be true of
every run whose statement carries it, and say no more than is proven.
"""

from __future__ import annotations

import dataclasses
import json
import re

from tff_dpftrl.accounting import composition, display, facts, trade_off
from tff_dpftrl.accounting import parts as parts_lib
from tff_dpftrl.accounting import privacy_statement as statement_lib
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.participation import observed as observed_lib
from tff_dpftrl.participation import schema as schema_lib

PlainSentences = tuple[str, str, str, str, str]
"""Who is protected, from whom, what it means for one person, what is released, what is not."""

_YOURS = {"user": "your data", "device": "your device's data", "example": "one example of yours"}
SCALE = (
    "For scale: the page “Published deployments of differential privacy” of tff_dpftrl's "
    "documentation (docs/explanation/published_deployments.md)."
)
# Symbol, pattern by which it is found, and meaning. A statement explains those that it uses.
_LEGEND = (
    (
        "ε, δ",
        "ε|δ",
        "every set of outcomes has at most e^ε times the probability that it has with a "
        "neighbouring data set, plus δ",
    ),
    ("ρ", "ρ", "parameter of zero-concentrated differential privacy (zCDP)"),
    (
        "μ",
        "μ",
        "largest change that one {unit} can make, over the standard deviation of the noise: "
        "telling whether the data of one {unit} was used or replaced by zeros is as hard as "
        "telling a Gaussian around 0 from one around μ",
    ),
    (
        "S",
        r"\bS\b|sensitivity_",
        "sensitivity: largest L2 norm of the change that one {unit} can make to all that noise is "
        "added to, for a clip norm of 1 (sensitivity_squared is S²)",
    ),
    (
        "z",
        r"\bz\b",
        "noise_multiplier: standard deviation of the noise for a clip norm of 1",
    ),
    ("σ", "σ", "noise_multiplier: standard deviation of the noise for a clip norm of 1"),
    ("p", r", p\)", "sampling_probability"),
    (
        "clip_norm_inflation",
        "clip_norm_inflation",
        "factor by which rounding to a grid can lengthen a clipped contribution; 1 without a grid",
    ),
    ("stride", r"\bstride\b", "distance j − i of two rounds i < j of one {unit}"),
    ("gap", r"\bgap\b", "number of rounds between these, stride − 1"),
    ("MinS", "MinS", "smallest stride or gap of any {unit}"),
    ("MaxP", "MaxP", "largest number of rounds of one {unit}"),
)


def to_json(statement: statement_lib.PrivacyStatement) -> str:
    """Writes a statement as JSON; epsilon is null without a guarantee."""
    derived = {
        "participation_record": statement.participation_record,
        "plain_sentences": plain(statement),
    }
    values = {"schema": statement_lib.SCHEMA} | dataclasses.asdict(statement) | derived
    if not statement.parts:
        del values["parts"]
    return json.dumps(values, indent=2, allow_nan=False)


def _participation(
    title: str, counted: schema_lib.MinSep | observed_lib.Participation | None
) -> str:
    if counted is None:
        return f"| {title} | not recorded | | | |"
    if counted.min_sep is None:
        separation = "none took part twice | |"
    else:
        separation = f"{counted.min_sep} | {counted.min_sep_gap} |"
    return f"| {title} | {counted.num_rounds} | {separation} {counted.max_participations} |"


def _bullets(lines: tuple[str, ...]) -> list[str]:
    return [f"- {line}" for line in lines]


def _parts(statement: statement_lib.PrivacyStatement) -> list[str]:
    """Returns the table of all that the run releases, with its costs; empty for weights alone."""
    if not statement.parts:
        return []

    def row(name: str, epsilon: float | None, rho: float | None, says: str) -> str:
        shown = display.round_up(rho) if rho else ""  # Figures of rounds cost, and have none here.
        cells = (name, display.round_up(epsilon), shown, says)
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |".replace("|  |", "| |")

    return [
        "## Parts",
        "",
        f"| part | ε alone, at δ = {display.delta(statement.delta)} | ρ | what is released |",
        "|---|---|---|---|",
        *(row(one.name, one.epsilon_alone, one.rho_zcdp, one.says) for one in statement.parts),
        row("the whole run", statement.epsilon, statement.rho_zcdp, "all but earlier runs"),
        "",
        "The choice is what it adds to ε of one run, the worst that it may have been among."
        if any(one.name == parts_lib.SELECTION for one in statement.parts)
        else "What parts cost alone does not add up to the whole: see Accounting.",
        *(
            ["The evaluation is of other users than the rest, and the larger ε is that of both."]
            if any(one.name == parts_lib.EVALUATION for one in statement.parts)
            else []
        ),
        "",
    ]


def _unit(statement: statement_lib.PrivacyStatement) -> str:
    """Returns the unit of privacy, with its meaning in the corpus if the parameters give one."""
    unit, meaning = f"one {statement.unit_of_privacy}", statement.parameters.get("user")
    return unit if meaning is None or meaning == unit else f"{unit}, here {meaning}"


def _readable(name: str, value: facts.Scalar) -> facts.Scalar:
    """Rounds a parameter up if a larger value promises less, so that it cannot flatter."""
    if name == "sampling_probability" and isinstance(value, int | float):
        return display.round_up(value, 6)
    return value


def _headline(statement: statement_lib.PrivacyStatement) -> list[str]:
    """Returns epsilon and delta, with the caveats without which they must not be quoted."""
    if not statement.has_guarantee:
        return ["**No differential privacy guarantee.**", "", *_bullets(statement.no_guarantee)]
    bound = f"(ε = {display.round_up(statement.epsilon)}, δ = {display.delta(statement.delta)})"
    promise = f"{statement.unit_of_privacy.capitalize()}-level {bound}-differential privacy"
    if statement.participation_record == "assumed":
        what = "sampling of cohorts" if statement.accounted is None else "participation schema"
        why = "it was assumed, not observed"
        if sentences.REPORTED_BY_DEVICES in statement.assumptions:
            by_whom = "devices keep to it by their own timers"
            why = f"{by_whom}, and nobody can check what they report of it"
        promise += f", if the {what} was kept: {why}"
    rho = "" if statement.rho_zcdp is None else f", ρ = {display.round_up(statement.rho_zcdp)} zCDP"
    lines = [f"**{promise}**{rho}, by the mechanism {statement.mechanism}."]
    for caveat in statement.headline_caveats:
        lines += ["", f"**{caveat}**"]
    return lines


def _subject(statement: statement_lib.PrivacyStatement) -> list[str]:
    if not statement.subject:
        return []
    lines = [f"- {name}: {value}" for name, value in statement.subject.items()]
    return ["## What this is about", "", *lines, ""]


def _legend(statement: statement_lib.PrivacyStatement, text: str) -> list[str]:
    """Returns the meaning of the symbols in a text, and of other words for the unit of privacy."""
    unit = statement.unit_of_privacy
    lines = [
        f"- {symbol}: {meaning.format(unit=unit)}."
        for symbol, pattern, meaning in _LEGEND
        if re.search(pattern, text)
    ]
    others = [word for word in ("client", "user", "device") if word != unit]
    names = [word for word in others if re.search(rf"^- \w*_?{word}s?_?\w*:", text, re.MULTILINE)]
    if names:
        lines.append(f"- {' and '.join(names)}, in names of parameters: {unit}.")
    return ["## Legend", "", *lines, ""]


def markdown(statement: statement_lib.PrivacyStatement) -> str:
    """Renders a statement; the rounded numbers stand exactly in the JSON."""
    opening = ["# Privacy statement", "", *_bullets(plain(statement)), ""]
    body = _body(statement)
    end = [SCALE, "", f"tff_dpftrl {statement.code_version}"]
    lines = [*opening, *body, *_legend(statement, "\n".join(body)), *end]
    return "".join(f"{one_line(line)}\n" for line in lines)


def one_line(text: str) -> str:
    """Returns text without line ends, by which a name in it could begin a part of its own."""
    return " ".join(text.splitlines())


def _body(statement: statement_lib.PrivacyStatement) -> list[str]:
    """Returns the technical part."""
    lines = ["## Guarantee", "", *_headline(statement), "", *_subject(statement)]
    lines += [
        "## Setting",
        "",
        f"- Trust: {statement.setting}",
        f"- Unit of privacy: {_unit(statement)}.",
        f"- Neighbouring data sets: {statement.adjacency}",
        f"- Released: {statement.output}",
        "",
        "## Covered",
        "",
        *_bullets(statement.covered),
        "",
        "## Not covered",
        "",
        *_bullets(statement.not_covered),
        "",
    ]
    if statement.accounted is not None:
        lines += [
            "## Participation",
            "",
            "| | rounds | MinS, stride (j − i) | MinS, gap (rounds in between) | MaxP |",
            "|---|---|---|---|---|",
            _participation("declared", statement.declared),
            _participation("accounted for", statement.accounted),
            _participation("observed", statement.observed),
            "",
        ]
    lines += _parts(statement)
    lines += [
        "## Accounting",
        "",
        statement.accounting,
        "",
        "Assumptions:",
        "",
        *_bullets(statement.assumptions),
        "",
        "## Mechanism and parameters",
        "",
        f"- mechanism: {statement.mechanism}",
        *(f"- {name}: {_readable(name, value)}" for name, value in statement.parameters.items()),
        "",
        "## Caveats",
        "",
        *_bullets(statement.caveats),
        "",
        *(["## Audits", "", *_bullets(statement.audits), ""] if statement.audits else []),
    ]
    return lines


def plain(statement: statement_lib.PrivacyStatement) -> PlainSentences:
    """Says in plain words who is protected, from whom, how much, and what is (not) covered."""
    if not statement.has_guarantee:
        return _without_guarantee(statement)
    return (
        _who(statement),
        statement.from_whom or sentences.FROM_WHOM_UNKNOWN,
        _odds(statement),
        _released(statement),
        _not_covered(statement),
    )


def _without_guarantee(statement: statement_lib.PrivacyStatement) -> PlainSentences:
    yours = _YOURS[statement.unit_of_privacy]
    return (
        f"Nobody is protected: nothing is proven of this run. {' '.join(statement.no_guarantee)}",
        "Whoever sees what is released may learn from it what they like.",
        f"Suppose a coin flip decides whether {yours} is used. Whoever guesses the result may be "
        "right every time.",
        "So treat the models of this run, and what is computed from them, like the data itself.",
        "Nothing is covered: what is said below of clipping and noise is no promise.",
    )


def _who(statement: statement_lib.PrivacyStatement) -> str:
    unit = statement.unit_of_privacy
    if statement.is_refuted:
        return (
            "Take nobody to be protected: an audit has found that what this run claims cannot be "
            f"true. What is said here of every {unit} is only the claim: rely on none of it."
        )
    if unit == "example":
        text = (
            "Every single example of the data is protected. All examples of one person together "
            "are protected less."
        )
    else:
        text = f"Every single {unit} is protected, with all of its data that this training used"
        if statement.data_in_one_place:
            text += "."
        elif unit == "device":
            text += (
                ", as long as it follows the algorithm, and takes part no more often and no sooner "
                "again than declared. A person with several devices is protected less."
            )
        else:
            text += ", as long as the user's software follows the algorithm."
    meaning = statement.parameters.get("user")
    return text if meaning in (None, unit) else f"{text} A user is here {meaning}."


def _odds(statement: statement_lib.PrivacyStatement) -> str:
    """Returns what the guarantee means for one person, with its conditions."""
    if statement.is_refuted:
        return "So no odds are stated: a guess may be right every time."
    yours = _YOURS[statement.unit_of_privacy]
    is_sampled = statement.accounted is None
    known = "who may be drawn and with what chance" if is_sampled else "who takes part and when"
    parts = [
        f"Suppose a coin flip decides whether {yours} is used or replaced by zeros. The attacker "
        f"already knows {known}, and how much data there is. An attacker who guesses the result "
        f"from all that is released is right {_at_most(statement.trade_off())}, where 50 % would "
        "be chance."
    ]
    parameters = statement.parameters
    total = parameters.get("epsilon_with_earlier_runs"), parameters.get("delta_with_earlier_runs")
    if None not in total:
        together = trade_off.TradeOff((total,))  # pyright: ignore[reportArgumentType]
        parts.append(
            "This counts this run alone. From it together with the runs that its initial weights "
            f"come from, the guess is right {_at_most(together)}."
        )
    elif any(composition.NOTHING_TOGETHER in line for line in statement.headline_caveats):
        parts.append(
            "This counts this run alone. Nothing is promised for it together with the other runs "
            "that are named below: the guess may be right every time."
        )
    elif any(
        line.startswith((sentences.INITIAL_WEIGHTS, sentences.OTHER_TASKS))
        for line in statement.headline_caveats
    ):
        parts.append("This counts this run alone, and nothing else that was trained on your data.")
    if statement.participation_record == "assumed":
        what = "nobody took part more often, or sooner again, than declared"
        if statement.accounted is None:
            what = "what each round used was drawn at random and in secret"
        why = "that was assumed, not observed"
        if sentences.REPORTED_BY_DEVICES in statement.assumptions:
            what = "devices keep to the declared participation by their own timers"
            why = "nobody can check what they report of it"
        parts.append(f"This holds if {what}: {why}.")
    if sentences.CLIPPED_BY_CALLER in statement.assumptions:
        parts.append("It rests on code outside this package, which nothing here has checked.")
    if sentences.EXPECTED_RUNS in parameters:
        parts.append(
            "This holds if the number of runs, how long they took and how well they did stay "
            "secret."
        )
    if sentences.CLAIMED_BY_AUTHOR in statement.assumptions:
        parts.append("It rests on what the author of the mechanism says of it, without a proof.")
    if statement.headline_caveats:
        parts.append("The sentences in bold below belong to it.")
    return " ".join(parts)


def _at_most(curve: trade_off.TradeOff | None) -> str:
    share = display.percent_up(1.0 if curve is None else curve.best_guess())
    return f"at most {share} of the time" if share != "100 %" else "perhaps every time"


def _released(statement: statement_lib.PrivacyStatement) -> str:
    if sentences.EXPECTED_RUNS in statement.parameters:
        return (
            "What is released is, of the run that was chosen, the final model and every model on "
            "the way to it, the sums with noise that they are made of, and whatever is computed "
            f"from these without the data.{_other_parts(statement)} Of the other runs nothing is "
            "released."
        )
    sent = "" if statement.data_in_one_place else f" (sent to {statement.unit_of_privacy}s or not)"
    return (
        f"What is released is the final model and every model on the way to it{sent}, the sums "
        f"with noise that they are made of, and whatever is computed from these without the data."
        f"{_other_parts(statement)}"
    )


def _other_parts(statement: statement_lib.PrivacyStatement) -> str:
    """Returns what else is released, with its cost alone; empty if nothing is."""
    others = [
        row
        for row in statement.parts[1:]
        if not row.name.startswith((parts_lib.EARLIER, parts_lib.SELECTION))
    ]
    if not others:
        return ""
    rows = (*statement.parts[:1], *others)
    alone = ", ".join(f"{row.name} ε = {display.round_up(row.epsilon_alone)}" for row in rows)
    return (
        f" Released with noise, too: {', '.join(row.name for row in others)}. The promise "
        f"is for all of them together, ε = {display.round_up(statement.epsilon)}. Each alone would "
        f"cost: {alone}."
    )


def _not_covered(statement: statement_lib.PrivacyStatement) -> str:
    chosen = sentences.EXPECTED_RUNS in statement.parameters
    parts = [
        "exact figures such as losses, accuracies and counts",
        "what is decided by them",
        "which settings were tried" if chosen else "the choice of settings",
    ]
    if any(line.startswith(sentences.VOCABULARY) for line in statement.not_covered):
        parts.append("which words the model knows")
    if not statement.data_in_one_place:
        parts.append(f"{statement.unit_of_privacy}s that do not follow the algorithm")
    return (
        f"The guarantee does not cover {', '.join(parts)}, and other uses of the same data; the "
        "list below has it in full."
    )
