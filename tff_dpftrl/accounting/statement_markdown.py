"""Renders privacy statements as Markdown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tff_dpftrl.accounting import display
from tff_dpftrl.accounting import parts as parts_lib
from tff_dpftrl.accounting import statement_sentences as sentences

if TYPE_CHECKING:
    from tff_dpftrl.accounting import facts, privacy_statement
    from tff_dpftrl.participation import observed as observed_lib
    from tff_dpftrl.participation import schema as schema_lib

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


def _parts(statement: privacy_statement.PrivacyStatement) -> list[str]:
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


def _unit(statement: privacy_statement.PrivacyStatement) -> str:
    """Returns the unit of privacy, with its meaning in the corpus if the parameters give one."""
    unit, meaning = f"one {statement.unit_of_privacy}", statement.parameters.get("user")
    return unit if meaning is None or meaning == unit else f"{unit}, here {meaning}"


def _readable(name: str, value: facts.Scalar) -> facts.Scalar:
    """Rounds a parameter up if a larger value promises less, so that it cannot flatter."""
    if name == "sampling_probability" and isinstance(value, int | float):
        return display.round_up(value, 6)
    return value


def _headline(statement: privacy_statement.PrivacyStatement) -> list[str]:
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


def _subject(statement: privacy_statement.PrivacyStatement) -> list[str]:
    if not statement.subject:
        return []
    lines = [f"- {name}: {value}" for name, value in statement.subject.items()]
    return ["## What this is about", "", *lines, ""]


def _legend(statement: privacy_statement.PrivacyStatement, text: str) -> list[str]:
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


def render(statement: privacy_statement.PrivacyStatement) -> str:
    """Renders a statement; the rounded numbers stand exactly in the JSON."""
    opening = ["# Privacy statement", "", *_bullets(statement.plain_sentences()), ""]
    body = _body(statement)
    end = [SCALE, "", f"tff_dpftrl {statement.code_version}"]
    lines = [*opening, *body, *_legend(statement, "\n".join(body)), *end]
    return "".join(f"{one_line(line)}\n" for line in lines)


def one_line(text: str) -> str:
    """Returns text without line ends, by which a name in it could begin a part of its own."""
    return " ".join(text.splitlines())


def _body(statement: privacy_statement.PrivacyStatement) -> list[str]:
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
