"""README.md of a results folder: which file is what, and the card of the model in it.

It is one file, since Hugging Face takes a model's README.md for its card: the block of YAML at the
top is what it indexes. All of it is made from what may be published.
"""

from __future__ import annotations

import json
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence

from tff_dpftrl import durable_files, json_text, version
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.accounting import statement_text
from tff_dpftrl.reports import page
from tff_dpftrl.reports import results as results_lib

NAME = "README.md"

_MODELS = ("model.npz", "weights.npz")
_WORDS = "next-word prediction"
_MEASURED = {
    results_lib.ACCURACY: ("accuracy", "top-1 accuracy, words in the vocabulary"),
    results_lib.LOSS: ("cross-entropy", "cross-entropy, nats per word or sub-word"),
    "eval_bits_per_character": ("bits per character", "bits per character of the text"),
}
_TAGS: Mapping[str, Sequence[str]] = {
    "training": ("differential-privacy", "dp-ftrl", "federated-learning"),
    "finetuning": ("differential-privacy", "fine-tuning"),
    "custom finetuning": ("differential-privacy",),
    "task": ("differential-privacy", "dp-ftrl", "federated-learning"),
    "handed on": ("differential-privacy",),
}
_WHO = {
    "yes": "may be published",
    "yes, but": "may be published where its content may be seen",
    "no": "**the operator only**",
    "never": "**never hand it on**",
}
_EXACT_OF_PROTECTED = (
    "Held-out users are protected, and tables and pictures here have exact figures of them "
    "(`cells.csv`, `summary.csv`, `summary.md`, `curves.png`, `pareto.png`): **the operator only**."
)
_PATH = re.compile(r"(?:[\w.~-]*/)+([^/\s,;]+)")  # In a sentence; its last part may be told.
_RESUME = {
    "training": "tff-dpftrl train --resume --output {name}",
    "finetuning": "tff-dpftrl finetune --resume --output {name}",
}


def write(folder: pathlib.Path) -> None:
    """Writes README.md of a results folder, from what may be published of its other files."""
    durable_files.write(folder / NAME, of(results_lib.read(folder)).encode("utf-8"))


def of(found: results_lib.Results) -> str:
    """Returns the README of a results folder, as Markdown."""
    if found.is_private:
        raise ValueError("A README is made of what may be published: read without private=True.")
    # A card, which has the model's tags, is for what may be published.
    has_model = found.may_be_published and any((found.folder / name).exists() for name in _MODELS)
    title = f"{page.TITLES[found.kind]}: {_plain(found.data)}"
    lines = [*(_metadata(found) if has_model else []), f"# {title}", "", page.headline(found), ""]
    if found.kind == "sweep":
        lines += [sentences.CHOICE_AMONG_RUNS, ""]
        if results_lib.protects_held_out(json_text.read_object(found.folder / "sweep.json")):
            lines += [_EXACT_OF_PROTECTED, ""]
    if has_model:
        lines += _card(found)
    elif found.statement is not None:
        lines += ["## Privacy", "", *_opening(found), ""]
    elif found.kind == "sweep":
        lines += ["Each folder in `cells/` is a run with a README.md of its own.", ""]
    lines += ["## Files", "", "| file | what it is | who may see it |", "|---|---|---|"]
    for file in found.present_files():
        lines.append(f"| `{file.name}` | {file.what} | {_WHO[file.publish]} |")
    lines += ["", "## What to type next", "", "From the folder above this one:", "", "```sh"]
    lines += [*_next(found), "```", ""]
    lines += [f"Written by tff_dpftrl {version.__version__}; a later report replaces this file."]
    return "\n".join(lines) + "\n"


def _plain(text: object) -> str:
    """Returns text from data without what Markdown, HTML or a line end would make of it."""
    shown = "".join(c if c.isprintable() else "�" for c in str(text))
    return re.sub(r"([\\`*_\[\]|<>#~])", r"\\\1", shown)


def _quoted(text: object) -> str:
    """Returns a string of YAML."""
    shown = "".join(c if c.isprintable() else "�" for c in str(text))
    return json.dumps(shown, ensure_ascii=False)


def _number(value: float) -> str:
    """Returns a number of YAML 1.1, in which an exponent needs a point before it and a sign."""
    return f"{value:.16e}" if "e" in repr(value) else repr(value)


def _metadata(found: results_lib.Results) -> list[str]:
    """Returns the YAML that Hugging Face reads; what is not known, like a licence, is left out."""
    lines = ["---"]
    if found.options.get("vocabulary") == "english":
        lines.append("language: en")
    lines.append("library_name: tff_dpftrl")
    tags = list(_TAGS.get(found.kind, ()))
    if not found.has_guarantee:
        tags = [tag for tag in tags if tag != "differential-privacy"]
    if found.is_of_words:
        lines.append("pipeline_tag: text-generation")
        tags += ["language-model", "next-word-prediction"]
    lines += ["tags:", *(f"- {tag}" for tag in tags)] if tags else []
    measured = _last(found)
    if measured:
        lines += [
            "model-index:",
            f"- name: {_quoted(found.folder.absolute().name)}",
            "  results:",
            "  - task:",
            "      type: text-generation" if found.is_of_words else "      type: other",
            *([f"      name: {_WORDS}"] if found.is_of_words else []),
            "    dataset:",
            f"      name: {_quoted(f'{found.held_out} of {found.data}')}",
            f"      type: {_quoted(found.data)}",
            "    metrics:",
        ]
        for name, value in measured.items():
            kind, meaning = _meaning(found, name)
            lines += [f"    - type: {_quoted(kind)}", f"      name: {_quoted(meaning)}"]
            lines.append(f"      value: {_number(value)}")
    return [*lines, "---", ""]


def _last(found: results_lib.Results) -> dict[str, float]:
    """Returns the last metrics on held-out users, or data, that a card names."""
    last = found.evaluations[-1] if found.evaluations else {}
    names = [name for name in last if name.startswith("eval_")]
    named = [name for name in _MEASURED if name in names and found.is_of_words]
    return {name: last[name] for name in (named or names)}


def _meaning(found: results_lib.Results, name: str) -> tuple[str, str]:
    """Returns the name of a metric for Hugging Face and for people; of a custom model, as it is."""
    given = name.removeprefix("eval_")
    return _MEASURED.get(name, (given, given)) if found.is_of_words else (given, given)


def _card(found: results_lib.Results) -> list[str]:
    facts = found.facts
    unit = "user" if found.statement is None else found.statement.unit_of_privacy
    use = (
        f"Meant for {_WORDS} in text like that which it was trained on."
        if found.is_of_words
        else "What the model is for is not recorded: say so here before you publish it."
    )
    lines = ["## Intended use", "", use, "", "## Training data", ""]
    if found.kind == "pretraining":
        lines.append(f"- Public text: {_plain(facts.get('source', 'not recorded'))}")
    else:
        what = "text" if found.is_of_words else "data"
        lines.append(f"- Private {what}: {_plain(found.data)}")
        for name, what in (
            ("training_users", f"Training {unit}s"),
            ("user_unit", "A user is"),
            ("initial_weights_source", "It began with"),
        ):
            if facts.get(name):
                lines.append(f"- {what}: {_plain(facts[name])}")
    if facts.get("vocabulary_source"):
        source = _PATH.sub(r"\1", str(facts["vocabulary_source"]))
        lines.append(f"- Vocabulary: {_plain(source)}")
    lines += ["", "## Privacy", "", *_opening(found), "", *_evaluation(found)]
    lines += ["## Limits", ""]
    if found.statement is not None:
        lines.append("- What the statement does not cover is listed in `privacy_statement.md`.")
    lines += [
        "- Nothing has been tested but what stands here: not bias, not harmful proposals, not text "
        "of other people or languages."
        if found.is_of_words
        else "- Nothing has been tested but what stands here: not bias, and not other data.",
        "- The licence is not recorded: whoever publishes the model adds it above.",
        "",
    ]
    return lines


def _opening(found: results_lib.Results) -> list[str]:
    """Returns the beginning of the statement, with the caveats that must stand beside ε."""
    if found.statement is None:
        return [page.headline(found)]
    _, _, text = statement_text.markdown(found.statement).partition("\n")
    opening = re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)[0]
    beside = [*found.statement.no_guarantee, *found.statement.headline_caveats]
    lines: list[str] = [opening.strip(), *(f"**{one}**" for one in beside if one not in opening)]
    lines.append("In full: `privacy_statement.md`.")
    return "\n\n".join(lines).replace("<", "&lt;").replace("[", "\\[").split("\n")


def _evaluation(found: results_lib.Results) -> list[str]:
    measured = _last(found)
    lines = ["## Evaluation", ""]
    if not measured:
        if found.options.get("held_out_users") == "protected":
            none = "Held-out users are protected: exact figures of them stay in `private/`."
        else:
            none = f"It has not been measured on {found.held_out}."
        return [*lines, none, ""]
    lines += [f"| on {found.held_out} | value |", "|---|---|"]
    for name, value in measured.items():
        lines.append(f"| {_plain(_meaning(found, name)[1])} | {_value(name, value)} |")
    for name, value in found.baselines.items():
        which = name if name == results_lib.MODEL_WITH_EARLIER_TEXT else f"{name} model"
        lines.append(f"| top-1 accuracy of the {which} | {value:.2%} |")
    lines += ["", page.HELD_OUT]
    if found.kind in ("training", "finetuning"):
        lines.append(
            "How n-grams (unigrams to 4-grams) do on the same users is an exact figure of the "
            "training users: it is not named here, and not to be published."
        )
    return [*lines, ""]


def _value(name: str, value: float) -> str:
    return f"{value:.2%}" if name == results_lib.ACCURACY else f"{value:.4g}"


def _next(found: results_lib.Results) -> list[str]:
    name, kind = shlex.quote(found.folder.absolute().name), found.kind
    report = [
        "# All of it as one page, to print or to hand on.",
        f"tff-dpftrl report {name} --html",
    ]
    if kind == "sweep":
        return ["# The options, promises and curves of some of its runs.", *_cells(found), *report]
    if kind == "pretraining":
        begin = (
            f"tff-dpftrl train --config quickstart --initial-weights {name} --output private_run"
        )
        return ["# Train on private text from here.", begin, *report]
    lines = []
    has_private = (found.folder / "private").exists()
    if has_private and kind in _RESUME:
        lines += ["# Go on, if it was interrupted.", _RESUME[kind].format(name=name)]
    if has_private:
        recount = page.recount_command(found)
        lines += ["# Derive the statement again from the records.", recount]
    if found.is_of_words and found.may_be_published:
        lines += ["# Ask the model.", f'tff-dpftrl predict {name} "the number of"']
        lines += [f"tff-dpftrl export {name} --output exported --tflite"]
    return [*lines, *report]


def _cells(found: results_lib.Results) -> list[str]:
    names = [f"{found.folder.absolute().name}/cells/{cell}" for cell in list(found.cells)[:2]]
    return (
        [f"tff-dpftrl compare-runs {' '.join(map(shlex.quote, names))}"] if len(names) == 2 else []
    )
