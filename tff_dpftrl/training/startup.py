"""Progress lines that describe a run before its first round."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tff_dpftrl import validation
from tff_dpftrl.accounting import display
from tff_dpftrl.data import subwords, tokenizer, vocabulary
from tff_dpftrl.runs import mechanism_plan
from tff_dpftrl.training import text_task

_NUM_LOOKED_AT = 1000  # Texts whose script is looked at.
_MANY_UNKNOWN = 0.1  # Share of unknown words above which a run is told what to do.


def describe_task(language_task: text_task.TextTask, *, words_are_kept: bool = False) -> list[str]:
    """Describes users, text and vocabulary: exact figures, for the operator's eyes only."""
    words, text = language_task.words, language_task.training_text
    without = f" ({text.num_users_without_text} of them without text)"
    return [
        f"Users: {text.num_users} to train on{without if text.num_users_without_text else ''}, "
        f"{language_task.num_held_out_users} held out for evaluation, "
        f"{language_task.num_untouched_users} kept for a test of your own and not used.",
        f"Text: {text.num_words} {words.unit} to train on, {text.oov_share:.1%} of them not among "
        f"the {len(words.words)} of the vocabulary ({words.source}).",
        *describe_script(language_task.train.corpus.texts(), words, are_kept=words_are_kept),
        *describe_unknown_words(text.oov_share, words, are_kept=words_are_kept),
    ]


def describe_script(
    texts: Iterable[str], words: vocabulary.Vocabulary, *, are_kept: bool = False
) -> list[str]:
    """Says what to do about texts without spaces between words, unless there are sub-words.

    Kept words are those of the initial weights.
    """
    first = itertools.islice(texts, _NUM_LOOKED_AT)
    if isinstance(words, subwords.Subwords) or not tokenizer.is_unspaced(first):
        return []
    remedy = (
        "Begin with weights that were pretrained on sub-words" if are_kept else "Take sub-words"
    )
    return [
        "Warning: many texts have no spaces between words, as in Chinese, Japanese, Thai, Khmer "
        f"and Burmese, and the model sees whole sentences as words. {remedy}: --tokenizer "
        "sentencepiece, or wordpiece for devices."
    ]


def describe_unknown_words(
    share: float, words: vocabulary.Vocabulary, *, are_kept: bool = False
) -> list[str]:
    """Says what to do about a vocabulary that lacks more than a tenth of a text's words.

    Other words would not fit initial weights whose words are kept. A vocabulary that has no word of
    the text at all is refused, unless it was counted with noise: that would show a draw before it
    is kept.
    """
    if share == 1.0 and not words.is_noised:
        raise validation.UsageError(
            f"vocabulary ({len(words.words)} words, {words.source}) has no word of the text: take "
            "a larger vocabulary_size, or a vocabulary of public text on the subject and in its "
            "language; for a language without spaces, one of sub-words (tokenizer)."
        )
    if share <= _MANY_UNKNOWN:
        return []
    known = "" if words.source == vocabulary.ENGLISH else "--vocabulary english, "
    if are_kept:
        known = f"initial weights that tff-dpftrl pretrain makes with {known}"
    return [
        f"Hint: the model cannot read or say words that it does not know, here more than one in "
        f"ten. Take {known}--vocabulary FILE (public text on the subject, or a word a line) or a "
        "larger --vocabulary-size; or --tokenizer sentencepiece, whose sub-words spell every word."
    ]


def describe_plan(
    plan: mechanism_plan.MechanismPlan,
    num_parameters: int,
    *,
    unit: str = "round",
    swamped: float = mechanism_plan.SWAMPED,
) -> list[str]:
    """Describes participation, noise, the ε to come, and the ratio of noise to signal.

    Above the ratio `swamped` of `MechanismPlan.noise_to_signal`, a hint is added.
    """
    lines = plan.describe()
    epsilon = plan.epsilon_after(plan.num_rounds)
    lines.append(
        "Privacy: NO guarantee."
        if epsilon is None
        else f"Privacy: ε at most {display.round_up(epsilon)} at δ = {display.delta(plan.delta)} "
        f"after all {plan.num_rounds} {unit}s."
    )
    if plan.simulated is not None:
        lines.append(f"Simulation: with the noise of this run, {plan.simulated.promise()}.")
    lines += plan.delta_warnings()
    if not plan.has_noise:
        return lines
    ratio = plan.noise_to_signal(num_parameters)
    lines.append(
        f"Noise to signal: {ratio:.2g} (norm of the noise in the sum of all {unit}s, over the "
        "largest norm that the clipped updates can add up to)."
    )
    if ratio > swamped:
        lines.append(
            f"Hint: the recorded runs that learned clearly had at most {swamped:g}, and few had "
            f"more. If this one does not learn, take larger or more {unit}s, a smaller model, one "
            "that is pretrained, or a larger ε."
        )
    return lines
