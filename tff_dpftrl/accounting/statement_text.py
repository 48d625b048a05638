"""A privacy statement as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tff_dpftrl.accounting import display

if TYPE_CHECKING:
    from tff_dpftrl.accounting import statement
    from tff_dpftrl.participation import observed
    from tff_dpftrl.participation import schema as schema_lib


def _participation(title: str, facts: schema_lib.MinSep | observed.Participation | None) -> str:
    if facts is None:
        return f"| {title} | not recorded | | | |"
    if facts.min_sep is None:
        separation = "none took part twice | |"
    else:
        separation = f"{facts.min_sep} | {facts.min_sep_gap} |"
    return f"| {title} | {facts.num_rounds} | {separation} {facts.max_participations} |"


def _bullets(lines: tuple[str, ...]) -> list[str]:
    return [f"- {line}" for line in lines]


def _unit(facts: statement.PrivacyStatement) -> str:
    """What is protected, and what that is in the corpus where a run says so."""
    unit, found = f"one {facts.unit_of_privacy}", facts.parameters.get("user")
    return unit if found is None or found == unit else f"{unit}, here {found}"


def _readable(name: str, value: statement.Scalar) -> statement.Scalar:
    """A parameter with few digits, if more of it promises less and rounding up cannot flatter."""
    if name == "sampling_probability" and isinstance(value, int | float):
        return display.round_up(value, 6)
    return value


def _headline(facts: statement.PrivacyStatement) -> list[str]:
    """What will be quoted: with all that it must not be quoted without."""
    if not facts.has_guarantee:
        return ["**No differential privacy guarantee.**", "", *_bullets(facts.no_guarantee)]
    bound = f"(ε = {display.round_up(facts.epsilon)}, δ = {facts.delta:g})"
    promise = f"{facts.unit_of_privacy.capitalize()}-level {bound}-differential privacy"
    if facts.participation_record == "assumed":
        what = "sampling of cohorts" if facts.accounted is None else "participation schema"
        promise += f", if the {what} was kept: it was assumed, not observed"
    rho = "" if facts.rho_zcdp is None else f", ρ = {display.round_up(facts.rho_zcdp)} zCDP"
    lines = [f"**{promise}**{rho}, by the mechanism {facts.mechanism}."]
    for caveat in facts.headline_caveats:
        lines += ["", f"**{caveat}**"]
    return lines


def to_markdown(facts: statement.PrivacyStatement) -> str:
    """Renders a statement.

    Args:
      facts: The statement.

    Returns:
      Markdown, ending with a newline. Costs in privacy and sampling probabilities are rounded
      up; the JSON has them exactly.
    """
    lines = ["# Privacy statement", "", *_headline(facts)]
    lines += [
        "",
        "## Setting",
        "",
        f"- Trust: {facts.setting}",
        f"- Unit of privacy: {_unit(facts)}.",
        f"- Neighbouring data sets: {facts.adjacency}",
        f"- Released: {facts.output}",
        "",
        "## Covered",
        "",
        *_bullets(facts.covered),
        "",
        "## Not covered",
        "",
        *_bullets(facts.not_covered),
        "",
    ]
    if facts.accounted is not None:
        lines += [
            "## Participation",
            "",
            "| | rounds | MinS, stride (j − i) | MinS, gap (rounds in between) | MaxP |",
            "|---|---|---|---|---|",
            _participation("declared", facts.declared),
            _participation("accounted for", facts.accounted),
            _participation("observed", facts.observed),
            "",
        ]
    lines += [
        "## Accounting",
        "",
        facts.accounting,
        "",
        "Assumptions:",
        "",
        *_bullets(facts.assumptions),
        "",
        "## Mechanism and parameters",
        "",
        f"- mechanism: {facts.mechanism}",
        *(f"- {name}: {_readable(name, value)}" for name, value in facts.parameters.items()),
        "",
        "## Caveats",
        "",
        *_bullets(facts.caveats),
        "",
        *(["## Audits", "", *_bullets(facts.audits), ""] if facts.audits else []),
        f"tff_dpftrl {facts.code_version}",
    ]
    return "\n".join(lines) + "\n"
