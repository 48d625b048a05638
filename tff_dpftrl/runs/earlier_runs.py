"""The runs that initial weights come from: what they have spent, by the statements in folders."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tff_dpftrl import json_text, validation
from tff_dpftrl.accounting import composition, privacy_statement
from tff_dpftrl.accounting import statement_sentences as sentences
from tff_dpftrl.runs import joint_runs, manifest

_RUNS, _SAME_USERS = "earlier_runs", "earlier_runs_have_same_users"
_STATEMENT = "privacy_statement.json"
_COPY = pathlib.PurePath("private", "manifest.json")
_USERS = ("training users", "users")  # Names of one identity, in runs on text and in custom ones.


def facts_of(folder: pathlib.Path, users: Sequence[str]) -> dict[str, Any]:
    """Returns what a run's manifest records of the run that its weights come from, for `parts`.

    `users` are ids of the new run's training users. It is empty if `folder`, that of the weights,
    is not that of a run.
    """
    chain = chain_of(folder)
    if not chain:
        return {}
    same = None
    identities = _read(folder / _COPY).get("identities", {})
    theirs = next((identities[name] for name in _USERS if name in identities), None)
    # Examples are named by their position, so that names are the same in any data.
    if theirs is not None and all(run.unit_of_privacy != "example" for run in chain):
        same = theirs == manifest.identity(users)
        if len(chain) > 1 and same:
            same = _facts(folder).get(_SAME_USERS)
    return {_RUNS: [run.to_json() for run in chain], _SAME_USERS: same}


def chain_of(folder: pathlib.Path) -> tuple[composition.Spent, ...]:
    """Returns what the run in a folder has spent, and those that its weights come from.

    The last run comes first; there is none if the folder is not that of a run. Of a folder that has
    the statement only, one entry is what the run and those before it have spent together. A run of
    which nothing is to be published is refused.
    """
    joint_runs.refuse_unreleased(folder)
    if not is_run(folder):
        return ()
    spent = statement_of(folder, together=not _has_manifest(folder))
    return spent or composition.Spent(folder.absolute().name), *parts(_facts(folder))[0]


def of_caller(folder: pathlib.Path, users: Sequence[str]) -> dict[str, Any]:
    """Returns the facts of weights which the caller says come from the run in a folder.

    They are `initial_weights_source`, `initial_weights_are_public` and those of `facts_of`.
    """
    folder = folder.expanduser()
    if not is_run(folder):
        raise validation.UsageError(
            f"There is no run in {folder}, from which the initial weights are said to come: name "
            "the folder with its privacy_statement.json, or say in words what they were trained on."
        )
    return {
        "initial_weights_source": f"the users of the run {folder.absolute().name!r}",
        "initial_weights_are_public": False,
        **facts_of(folder, users),
    }


def is_run(folder: pathlib.Path) -> bool:
    """Returns whether a folder is that of a run, or the report of a served task."""
    return (folder / _STATEMENT).exists() or _has_manifest(folder)


def statement_of(folder: pathlib.Path, *, together: bool = False) -> composition.Spent | None:
    """Reads what the run in a folder has spent, by its statement; None if it has none.

    With `together`, what the runs before it have spent counts, too. There is no guarantee if an
    audit refuted the claim, or for one of the runs of a choice (`sweep --select`), whose ε is
    another one.
    """
    path = folder / _STATEMENT
    if not path.exists():
        return None
    try:
        stated = _read(path)
        privacy_statement.refuse_edited(stated, path)
        name = folder.absolute().name
        if together and any(c.startswith(composition.BEGAN) for c in _caveats(stated)):
            name += " and those before it"
            total = stated.get("parameters", {})
            totals = (total.get(f"{key}_with_earlier_runs") for key in ("epsilon", "delta"))
            stated |= dict(zip(("epsilon", "delta"), totals, strict=True), rho_zcdp=None)
        spent = composition.Spent.from_json(name, stated)
        void = {sentences.refuted(str(entry)) for entry in stated.get("audits", ())}
        if (void | {sentences.ONE_OF_A_CHOICE}).isdisjoint(_caveats(stated)):
            return spent
        return composition.Spent(spent.name, unit_of_privacy=spent.unit_of_privacy)
    except privacy_statement.EditedError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise validation.UsageError(
            f"{path} cannot be read: {error}. Run tff-dpftrl report {folder} first."
        ) from None


def parts(facts: Mapping[str, Any]) -> tuple[tuple[composition.Spent, ...], bool | None]:
    """Returns the earlier runs of a manifest's facts, and whether they have the same users."""
    runs = tuple(composition.Spent(**entry) for entry in facts.get(_RUNS, ()))
    return runs, facts.get(_SAME_USERS)


def _caveats(stated: Mapping[str, Any]) -> Sequence[str]:
    return stated.get("headline_caveats", ())


def _has_manifest(folder: pathlib.Path) -> bool:
    # A folder in Hugging Face's layout has a file of the manifest's name, too.
    path = folder / manifest.NAME
    return path.exists() and "model_type" not in _read(path)


def _facts(folder: pathlib.Path) -> dict[str, Any]:
    return _read(folder / manifest.NAME).get("facts", {})


def _read(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object; an empty one if there is no file."""
    return json_text.read_object(path) if path.exists() else {}
