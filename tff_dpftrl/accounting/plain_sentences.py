"""Opens a privacy statement with five sentences for readers who have never heard of ε.

Each of them must be true of every run whose statement carries it, and say no more than is proven.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tff_dpftrl.accounting import composition, display, trade_off
from tff_dpftrl.accounting import parts as parts_lib
from tff_dpftrl.accounting import statement_sentences as sentences

if TYPE_CHECKING:
    from tff_dpftrl.accounting import privacy_statement

PlainSentences = tuple[str, str, str, str, str]
"""Who is protected, from whom, what it means for one person, what is released, what is not."""

_YOURS = {"user": "your data", "device": "your device's data", "example": "one example of yours"}


def of(statement: privacy_statement.PrivacyStatement) -> PlainSentences:
    """Returns the opening of a statement; each entry has one to four short sentences."""
    if not statement.has_guarantee:
        return _without_guarantee(statement)
    return (
        _who(statement),
        statement.from_whom or sentences.FROM_WHOM_UNKNOWN,
        _odds(statement),
        _released(statement),
        _not_covered(statement),
    )


def _without_guarantee(statement: privacy_statement.PrivacyStatement) -> PlainSentences:
    yours = _YOURS[statement.unit_of_privacy]
    return (
        f"Nobody is protected: nothing is proven of this run. {' '.join(statement.no_guarantee)}",
        "Whoever sees what is released may learn from it what they like.",
        f"Suppose a coin flip decides whether {yours} is used. Whoever guesses the result may be "
        "right every time.",
        "So treat the models of this run, and what is computed from them, like the data itself.",
        "Nothing is covered: what is said below of clipping and noise is no promise.",
    )


def _who(statement: privacy_statement.PrivacyStatement) -> str:
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


def _odds(statement: privacy_statement.PrivacyStatement) -> str:
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


def _released(statement: privacy_statement.PrivacyStatement) -> str:
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


def _other_parts(statement: privacy_statement.PrivacyStatement) -> str:
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


def _not_covered(statement: privacy_statement.PrivacyStatement) -> str:
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
