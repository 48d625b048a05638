"""What all runs on one corpus have spent together, by the statements in their folders."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tff_dpftrl import json_text, validation
from tff_dpftrl.accounting import composition, gaussian
from tff_dpftrl.accounting import parts as parts_lib
from tff_dpftrl.data import sources, table_files
from tff_dpftrl.mechanisms import branches, serialization
from tff_dpftrl.participation import recount
from tff_dpftrl.participation import schema as schema_lib
from tff_dpftrl.runs import cohort_seed, earlier_runs, joint_runs, manifest
from tff_dpftrl.training import corpus, language_config, warm_start

_FRESH_NOISE = 3
"""First version of the noise of which each execution of a round draws its own."""
_SAME_IN_COPIES = ("config", "derived", "facts", "kind", "noise_version")
"""Parts of `config.json` that a copy of a run has in common with it."""
_LEDGER = pathlib.PurePath("private", "ledger.sqlite")


@dataclasses.dataclass(frozen=True)
class Fork:
    """Folders that went on from one state of a run, or may have.

    Attributes:
      folders: The folders. One whose rounds are all in another one, too, costs nothing, unless its
        statement has an evaluation, which may have been made again, or states more.
      shared_rounds: Number of rounds that branches, or folders of one, share; None if unknown.
      spent: What all have spent together, to be composed. An entry without a guarantee says that
        their noise, or secret samples, may be the same after they part.
      unread: Folders whose ledgers are not readable: by their options they may be copies.
      is_choice: Whether they are copies of one choice among runs, which may have been made twice.
      num_branches: Number of folders that cost something; None if it is not known.
    """

    folders: tuple[pathlib.Path, ...]
    shared_rounds: int | None
    spent: tuple[composition.Spent, ...]
    unread: tuple[pathlib.Path, ...] = ()
    is_choice: bool = False
    num_branches: int | None = None

    @property
    def total(self) -> composition.Total | None:
        """Cost of all of them together; None if nothing is promised."""
        return composition.compose(self.spent)


@dataclasses.dataclass(frozen=True)
class Budget:
    """Privacy that the runs on a corpus have spent.

    Attributes:
      runs: The runs, and models that were pretrained on it without a guarantee, by folder. A choice
        among runs (`sweep --select`) is one entry.
      without_statement: Folders of runs on the corpus that have no statement yet.
      not_compared: Folders of runs whose corpus is not where it was or was in memory, or by whose
        options the corpus that is asked for cannot be read.
      not_found: Names of runs that others began with and that are in none of the folders.
      forks: Runs that went on several times from one state, or may have.
    """

    runs: dict[pathlib.Path, composition.Spent]
    without_statement: tuple[pathlib.Path, ...]
    not_compared: tuple[pathlib.Path, ...]
    not_found: tuple[str, ...]
    forks: tuple[Fork, ...] = ()

    @property
    def total(self) -> composition.Total | None:
        """All runs composed; None if one of them has no guarantee or no statement."""
        if self.without_statement or not self.runs:
            return None
        parts = [run for fork in self.forks for run in fork.spent]
        forked = {folder for fork in self.forks for folder in fork.folders}
        parts += [run for folder, run in self.runs.items() if folder not in forked]
        return composition.compose(parts)


def of_corpus(data: str, folders: Sequence[str | os.PathLike[str]]) -> Budget:
    """Finds the runs on a corpus in folders, and below them, and composes them.

    A run is on the corpus if its options name the same one, or a copy of the file, or if the corpus
    has the training users that are on the run's record. A choice among runs spends its ε with its
    first draw, whatever has become of its runs, whose number is secret.
    """
    asked = _Corpus(data)
    spent: dict[pathlib.Path, composition.Spent] = {}
    without, not_compared, began_with, known = [], [], set(), set()
    begun = (folder.parent for folder in _folders_with(str(manifest.COPY), folders))
    with_runs = sorted({*_folders_with(manifest.NAME, folders), *begun})
    released, charged = set(), []
    for choice in _choices(with_runs, folders):
        named, cost = _read_choice(choice)
        runs = filter(manifest.exists, choice.glob(f"private/{joint_runs.CELLS}/*"))
        if named is None:
            not_compared.append(choice)
        elif is_on := asked.is_of(named, runs):
            spent[choice] = cost
            charged.append(choice)
            known.add(joint_runs.WINNER)
            released.add(_statement(choice / manifest.PRIVATE / joint_runs.WINNER))
        elif is_on is None:
            not_compared.append(choice)
    for folder in with_runs:
        named = _config(folder).get("data")
        is_of_choice = joint_runs.choice_of(folder) or _statement(folder) in released - {None}
        if is_of_choice or not isinstance(named, str):
            continue  # It is listed above, or has options of something else.
        is_on = asked.is_of(named, [folder])
        if is_on is None:
            not_compared.append(folder)
        if not is_on:
            continue
        statement = earlier_runs.statement_of(folder)
        if statement is None:
            without.append(folder)
        else:
            spent[folder] = statement
        chain, _ = earlier_runs.parts(manifest.public(folder).get("facts", {}))
        began_with.update(run.name for run in chain)
    for folder in _folders_with(warm_start.RECORD, folders):
        named = warm_start.pretrained_on(folder)
        if named is not None and asked.is_named(named):
            spent[folder] = composition.Spent(folder.name)
    known |= {run.name for run in spent.values()} | {folder.name for folder in without}
    not_found = tuple(sorted(began_with - known))
    return Budget(spent, tuple(without), tuple(not_compared), not_found, _forks(spent, charged))


def _forks(
    spent: dict[pathlib.Path, composition.Spent], choices: Collection[pathlib.Path]
) -> tuple[Fork, ...]:
    """Finds runs whose ledgers have committed to the same states, and copies of choices."""
    records: dict[bytes, list[pathlib.Path]] = {}
    for choice in choices:
        records.setdefault((choice / joint_runs.RECORD).read_bytes(), []).append(choice)
    found = [
        Fork(tuple(same), None, _nothing(spent[same[0]]), is_choice=True)
        for same in records.values()
        if len(same) > 1
    ]
    runs = [folder for folder in spent if folder not in choices]
    states = {folder: _states(folder) for folder in runs}
    of_runs: dict[str, set[pathlib.Path]] = {}
    for folder, own in states.items():
        if own is not None:
            of_runs.setdefault(own[0], set()).add(folder)
    groups = list(of_runs.values())
    for folder in runs:
        if states[folder] is None:
            alike = {folder, *(one for one in runs if _may_be_copies(folder, one, spent))}
            groups, apart = [], groups
            for group in apart:
                if alike.isdisjoint(group):
                    groups.append(group)
                else:
                    alike |= group
            groups.append(alike)
    for group in groups:
        if len(group) > 1:
            known = {folder: states[folder] for folder in runs if folder in group}
            read = {folder: own for folder, own in known.items() if own is not None}
            is_read = len(read) == len(known)
            found.append(_fork(read, spent) if is_read else _possible_fork(known, spent))
    return tuple(found)


def _states(folder: pathlib.Path) -> tuple[str, ...] | None:
    """Reads the states that a run has committed to; None if its ledger is not readable, or gone."""
    try:
        states = recount.states(folder / _LEDGER)
    except (ValueError, OSError):  # Another process may have it open.
        return None
    return states if states and all(states) else None


def _may_be_copies(
    one: pathlib.Path, two: pathlib.Path, spent: dict[pathlib.Path, composition.Spent]
) -> bool:
    """Returns whether two folders may be of one run, by what copies of a folder have in common."""
    if one == two or spent[one].epsilon is None or spent[two].epsilon is None:
        return False  # Without a guarantee, nothing is promised in any case.
    of_one, of_two = manifest.public(one), manifest.public(two)
    if any(of_one.get(name) != of_two.get(name) for name in _SAME_IN_COPIES):
        return False
    seeds = _cohort_seed(one), _cohort_seed(two)
    return None in seeds or seeds[0] == seeds[1]


def _cohort_seed(folder: pathlib.Path) -> int | None:
    try:
        return cohort_seed.read(folder / manifest.PRIVATE)
    except ValueError:
        return None


def _nothing(run: composition.Spent) -> tuple[composition.Spent, ...]:
    return (composition.Spent(run.name, unit_of_privacy=run.unit_of_privacy),)


def _have_fresh_noise(folders: Iterable[pathlib.Path]) -> bool:
    versions = [manifest.public(folder).get("noise_version") for folder in folders]
    return all(isinstance(one, int) and one >= _FRESH_NOISE for one in versions)


def _possible_fork(
    states: dict[pathlib.Path, tuple[str, ...] | None],
    spent: dict[pathlib.Path, composition.Spent],
) -> Fork:
    """Charges folders that may be of one run, of which some ledger is not readable."""
    runs = [spent[folder] for folder in states]
    if not _have_fresh_noise(states) or any(run.rho_zcdp is None for run in runs):
        runs = list(_nothing(runs[0]))
    unread = tuple(folder for folder, own in states.items() if own is None)
    return Fork(tuple(states), None, tuple(runs), unread)


def _fork(
    states: dict[pathlib.Path, tuple[str, ...]], spent: dict[pathlib.Path, composition.Spent]
) -> Fork:
    apart: list[pathlib.Path] = []  # Without those whose rounds are all in a longer one.
    besides: list[pathlib.Path] = []  # Of these, what may have released something else.
    for folder, own in sorted(states.items(), key=lambda item: -len(item[1])):
        longer = [one for one in apart if states[one][: len(own)] == own]
        if not longer:
            apart.append(folder)
        elif not any(_covers(one, folder, spent) for one in longer):
            besides.append(folder)
    charged = [*apart, *besides]
    runs = [spent[folder] for folder in apart]
    rhos = [run.rho_zcdp for run in runs if run.rho_zcdp is not None]
    is_one = len(apart) == 1 or len(rhos) == len(apart)  # Else samples may be the same.
    are_independent = len(charged) == 1 or (is_one and _have_fresh_noise(charged))
    of_branches = [states[folder] for folder in charged] if len(charged) > 1 else states.values()
    shared_rounds, num_branches = _shared_rounds(of_branches), len(charged)
    if not are_independent or any(spent[folder].epsilon is None for folder in states):
        return Fork(tuple(states), shared_rounds, _nothing(runs[0]), num_branches=num_branches)
    if len(apart) > 1:
        fork_at = _shared_rounds(states[folder] for folder in apart)
        rho = _joint_rho(apart, rhos, fork_at)
        if rho < sum(rhos):
            delta = max(run.delta or 0.0 for run in runs)
            epsilon = gaussian.epsilon(gaussian.mu_from_rho(rho), delta)
            runs = [dataclasses.replace(runs[0], delta=delta, epsilon=epsilon, rho_zcdp=rho)]
    runs += [spent[folder] for folder in besides]
    return Fork(tuple(states), shared_rounds, tuple(runs), num_branches=num_branches)


def _shared_rounds(states: Iterable[tuple[str, ...]]) -> int:
    return len(os.path.commonprefix(list(states))) - 1


def _covers(
    longer: pathlib.Path, copy: pathlib.Path, spent: dict[pathlib.Path, composition.Spent]
) -> bool:
    """Returns whether a copy without rounds of its own has released no more than the longer run.

    Its evaluations may have been made again, with noise of their own.
    """
    if any(part["name"] == parts_lib.EVALUATION for part in _stated_parts(copy)):
        return False
    of_copy, of_longer = spent[copy], spent[longer]
    return all(
        ours is None or (theirs is not None and ours <= theirs)
        for ours, theirs in (
            (of_copy.epsilon, of_longer.epsilon),
            (of_copy.delta, of_longer.delta),
            (of_copy.rho_zcdp, of_longer.rho_zcdp),
        )
    )


def _stated_parts(folder: pathlib.Path) -> Sequence[Mapping[str, Any]]:
    return json_text.read_object(folder / "privacy_statement.json").get("parts") or ()


def _joint_rho(folders: Sequence[pathlib.Path], rhos: Sequence[float], shared_rounds: int) -> float:
    """Computes ρ of branches together; inf if they are not all of weights with one strategy."""
    stated = [json_text.read_object(folder / "privacy_statement.json") for folder in folders]
    if any(one.get("parts") for one in stated):
        return math.inf
    try:
        squares = [one["parameters"]["sensitivity_squared"] for one in stated]
        schemas = [schema_lib.MinSep(**one["accounted"]) for one in stated]
        together = branches.sensitivity(
            serialization.strategy_from_dict(manifest.public(folders[0])["derived"]["strategy"]),
            schema_lib.MinSep(
                max(one.num_rounds for one in schemas),
                min(one.min_sep for one in schemas),
                max(one.max_participations for one in schemas),
            ),
            num_branches=len(folders),
            fork_at=shared_rounds,
        )
        return together.squared * max(map(operator.truediv, rhos, squares))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return math.inf  # They are of another kind, or of another version.


_OF_PART = ("split", "sqlite_split", "sqlite_text_feature")


class _Corpus:
    """The corpus whose runs are sought."""

    def __init__(self, data: str):
        self._data = data
        self._users: dict[language_config.TextConfig, str | None] = {}

    def is_named(self, named: str) -> bool:
        """Returns whether a name in options is that of the corpus, or of a copy."""
        data = self._data
        if os.path.exists(data) and os.path.exists(named) and os.path.samefile(data, named):
            return True
        return sources.are_same_file(data, named)

    def is_of(self, named: str, folders: Iterable[pathlib.Path]) -> bool | None:
        """Returns whether runs were on the corpus, by its name or their records; None if unknown.

        The file of that name may have other users by now.
        """
        if self.is_named(named):
            return True
        found = {self._has_users_of(folder) for folder in folders}
        if True in found:
            return True
        is_gone = named != "docs" and not sources.is_on_disk(named)
        return None if is_gone or None in found else False

    def _has_users_of(self, folder: pathlib.Path) -> bool | None:
        """Returns whether a run's record has the users of the corpus; None if it is not readable.

        It is read by the run's options, but for those that say which part of another file or folder
        the run has read.
        """
        record = folder / manifest.COPY
        if not (record.exists() and sources.is_on_disk(self._data)):
            return False
        users = json_text.read_object(record).get("identities", {}).get("training users")
        if users is None:
            return False
        config = language_config.begun(_config(folder)) | {"data": self._data}
        names = language_config.TextConfig.__dataclass_fields__.keys() & config.keys()
        own = language_config.TextConfig(**{name: config[name] for name in names})
        of_part = {name: getattr(language_config.TextConfig, name) for name in _OF_PART}
        whole = dataclasses.replace(own, **of_part)
        ways = own, dataclasses.replace(whole, split=table_files.ALL), whole
        found = {self._identity(options.text) for options in ways}
        return users in found or (None if found == {None} else False)

    def _identity(self, options: language_config.TextConfig) -> str | None:
        """Returns the digest of the users of the corpus; None if it cannot be read so."""
        if options not in self._users:
            try:
                train = corpus.read_users(options, notice=lambda line: None).train
                self._users[options] = manifest.identity(train.user_ids)
            except ValueError:
                self._users[options] = None
        return self._users[options]


def _choices(
    with_runs: Sequence[pathlib.Path], folders: Sequence[str | os.PathLike[str]]
) -> list[pathlib.Path]:
    """Returns the folders of choices among runs in folders, or of which folders are a part."""
    found = {joint_runs.choice_of(folder) for folder in with_runs}
    found |= {
        folder.parent
        for folder in _folders_with(joint_runs.RECORD.name, folders)
        if folder.name == manifest.PRIVATE
    }
    return sorted(folder for folder in found if folder is not None)


def _read_choice(folder: pathlib.Path) -> tuple[str | None, composition.Spent]:
    """Returns the name of the corpus of a choice, None without a record, and what it costs."""
    none = composition.Spent(folder.name)
    path = folder / joint_runs.RECORD
    if not path.exists():
        return None, none
    content = json_text.read_object(path, remedy="Restore it.")
    try:
        options = {name: values[0] for name, values in content["axes"]} | content["options"]
        named = options.get("data", language_config.TextConfig.data)
        cost = composition.Spent(folder.name, content["delta"], content["plan"]["epsilon"])
    except (KeyError, TypeError, ValueError) as error:
        raise validation.UsageError(f"{path} cannot be read: {error!r}. Restore it.") from None
    stated = earlier_runs.statement_of(folder / joint_runs.WINNER)
    return named, none if stated is not None and stated.epsilon is None else cost


def _folders_with(name: str, folders: Sequence[str | os.PathLike[str]]) -> list[pathlib.Path]:
    with_name = set()
    for folder in map(pathlib.Path, folders):
        if not folder.is_dir():
            raise validation.UsageError(
                f"{folder} is no folder: name those that results folders are in."
            )
        with_name.update(path.parent.resolve() for path in folder.rglob(name))
    return sorted(with_name)


def _config(folder: pathlib.Path) -> dict[str, Any]:
    config = manifest.public(folder).get("config")
    return config if isinstance(config, dict) else {}


def _statement(folder: pathlib.Path) -> bytes | None:
    name = "privacy_statement.json"
    return validation.file_in(folder, name).read_bytes() if (folder / name).exists() else None
