"""A privacy statement as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tff_dpftrl.accounting import display

if TYPE_CHECKING:
    from tff_dpftrl.accounting import statement


def _participation(title: str, facts: statement.Participation | None) -> str:
    if facts is None:
        return f"| {title} | not recorded | | | |"
    if facts.min_sep is None:
        separation = "none took part twice | |"
    else:
        separation = f"{facts.min_sep} | {facts.min_sep - 1} |"
    return f"| {title} | {facts.num_rounds} | {separation} {facts.max_participations} |"


def _bullets(lines: tuple[str, ...]) -> list[str]:
    return [f"- {line}" for line in lines]


def to_markdown(facts: statement.PrivacyStatement) -> str:
    """Renders a statement.

    Args:
      facts: The statement.

    Returns:
      Markdown, ending with a newline. Costs in privacy are rounded up.
    """
    lines = ["# Privacy statement", ""]
    if facts.has_guarantee:
        bound = f"(ε = {display.round_up(facts.epsilon)}, δ = {facts.delta:g})"
        lines.append(f"**{facts.unit_of_privacy.capitalize()}-level {bound}-differential privacy**")
        if facts.rho_zcdp is not None:
            lines[-1] += f", ρ = {display.round_up(facts.rho_zcdp)} zCDP"
        lines[-1] += f", by the mechanism {facts.mechanism}."
    else:
        lines += ["**No differential privacy guarantee.**", "", *_bullets(facts.no_guarantee)]
    lines += [
        "",
        "## Setting",
        "",
        f"- Trust: {facts.setting}",
        f"- Unit of privacy: one {facts.unit_of_privacy}.",
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
        *(f"- {name}: {value}" for name, value in facts.parameters.items()),
        "",
        "## Caveats",
        "",
        *_bullets(facts.caveats),
        "",
        f"tff_dpftrl {facts.code_version}",
    ]
    return "\n".join(lines) + "\n"
