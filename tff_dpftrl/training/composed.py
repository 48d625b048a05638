"""Options in parts, with flat names: flags, keys of TOML files and `config.json` know no parts.

A class of options is a frozen dataclass. Its fields are options, made by `option`, or parts, made
by `part`: other classes of options. A part has several types where options exclude each other.
Each type has the options that it can have, and `part` names what chooses among them. `Options.of`
makes the parts of flat names, and refuses a name that the chosen type does not have.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from tff_dpftrl import validation
from tff_dpftrl.data import table_files
from tff_dpftrl.data import vocabulary as vocabulary_lib

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from typing_extensions import Self

_Part = TypeVar("_Part", bound="DataclassInstance")

FILES = {
    "data": ("docs",),
    "vocabulary": (None, "docs", "english", "private", vocabulary_lib.DP),
    "base_vocabulary": (None, "docs", "english", vocabulary_lib.NO_BASE),
    "strategy": (None,),
    "initial_weights": (None,),
    "proxy_data": ("standard-library",),
    "build": (None,),
}
"""Options that name files, and those of their values that do not."""

_TYPES, _CHOOSE = "types", "choose"


class Option(NamedTuple):
    """An option of a class: its field, and its type."""

    field: dataclasses.Field
    hint: Any


def option(default: Any, help: str, group: str, minimum: float | None = None) -> Any:
    """Makes a field of a config, with its meaning and group in `--help`, and its smallest value."""
    return dataclasses.field(
        default=default, metadata={"help": help, "group": group, "minimum": minimum}
    )


def part(
    *types: type[Options], choose: Callable[[Mapping[str, Any]], type[Options]] | None = None
) -> Any:
    """Makes a field of a config for a part; `choose` returns one of several types, by options."""
    return dataclasses.field(default_factory=types[0], metadata={_TYPES: types, _CHOOSE: choose})


@functools.cache
def _own(kind: type[DataclassInstance]) -> Mapping[str, Option]:
    """Returns the options that are fields of a class itself."""
    hints = typing.get_type_hints(kind)
    fields = (field for field in dataclasses.fields(kind) if _TYPES not in field.metadata)
    return {field.name: Option(field, hints[field.name]) for field in fields}


@functools.cache
def options_of(kind: type[DataclassInstance]) -> Mapping[str, Option]:
    """Returns all options of a class, those of all types of its parts included, by flat name."""
    found: dict[str, Option] = {}
    for field in dataclasses.fields(kind):
        if field.name in _own(kind):
            found[field.name] = _own(kind)[field.name]
        for one in field.metadata.get(_TYPES, ()):
            found |= {name: each for name, each in options_of(one).items() if name not in found}
    return found


def _names(kind: type[DataclassInstance], field: dataclasses.Field) -> Iterator[str]:
    """Returns the flat names of a field: its own, or those of the part's types."""
    if _TYPES not in field.metadata:
        yield field.name
    for one in field.metadata.get(_TYPES, ()):
        yield from options_of(one)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options that are checked one by one, by type and smallest value, as they are made."""

    chosen_by: ClassVar[str] = ""
    """What chooses this type of a part, for messages, like "algorithm 'dp-ftrl'"."""

    def __post_init__(self):
        for name, (field, hint) in _own(type(self)).items():
            value = _convert(name, getattr(self, name), hint)
            minimum = field.metadata.get("minimum")
            if minimum is not None and value is not None and not value >= minimum:
                raise validation.UsageError(f"{name} must be at least {minimum:g}, got {value!r}.")
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Returns the options with these flat names; all others have their defaults.

        Args:
          **options: Values by flat name, as in a TOML file.

        Returns:
          The options, in their parts.

        Raises:
          UsageError: If a value is wrong, or options contradict each other.
        """
        for name, kind, types in cls._without_effect(options):
            takers = [one.chosen_by for one in types if name in options_of(one)]
            raise validation.UsageError(
                f"{name} has no meaning with {kind.chosen_by}, but with {', with '.join(takers)}: "
                "leave one of them out."
            )
        return cls._made(options)

    @classmethod
    def of_begun(cls, **options: Any) -> Self:
        """Returns the options of a begun run; earlier versions took some without effect."""
        without = {name for name, _, _ in cls._without_effect(options)}
        return cls._made({name: options[name] for name in options if name not in without})

    @classmethod
    def _without_effect(
        cls, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, type[Options], tuple[type[Options], ...]]]:
        """Finds given options that the chosen type of a part does not have, with the types."""
        for field in dataclasses.fields(cls):
            kind, types = _chosen(field, options), field.metadata.get(_TYPES, ())
            for name in _names(cls, field) if kind is not None else ():
                default = options_of(cls)[name].field.default
                if name not in options_of(kind) and options.get(name, default) != default:
                    yield name, kind, types

    @classmethod
    def _made(cls, options: Mapping[str, Any]) -> Self:
        """Makes all parts; options that their types do not have are left out.

        What is wrong with several parts is said at once.
        """
        made = {n: v for n, v in options.items() if n in _own(cls) or n not in options_of(cls)}
        problems = []
        for field in dataclasses.fields(cls):
            if (kind := _chosen(field, options)) is not None:
                takes = options_of(kind)
                try:
                    made[field.name] = kind._made({n: options[n] for n in takes if n in options})
                except validation.UsageError as error:
                    problems.append(str(error))
        if problems:
            raise validation.UsageError(" ".join(problems))
        return cls(**made)  # Python refuses what is unknown.

    @classmethod
    def known(cls) -> frozenset[str]:
        """Returns the flat names that `of` takes."""
        return frozenset(options_of(cls))

    def given(self) -> list[str]:
        """Returns the flat names of the options that are not the defaults."""
        known = options_of(type(self))
        return [n for n, value in self.to_dict().items() if value != known[n].field.default]

    def changed(self, **options: Any) -> Self:
        """Returns the options with other values, by flat names.

        Args:
          **options: New values by flat name.

        Returns:
          Other options; these are not changed.

        Raises:
          UsageError: As for `of`.
        """
        return type(self).of(**{**self.to_dict(), **options})

    def with_absolute_paths(self) -> Self:
        """Returns options with files that can be found from every folder."""
        given = {name: value for name, value in self.to_dict().items() if name in FILES}
        return self.changed(**{name: absolute_path(name, given[name]) for name in given})

    def with_defaults(self) -> Self:
        """Returns options that name what follows from others."""
        return self

    def part(self, kind: type[_Part]) -> _Part:
        """Returns the options that are the fields of `kind`, with those that follow from others."""
        config = self.with_defaults()
        flat, names = config.to_dict(), [field.name for field in dataclasses.fields(kind)]
        return kind(**{n: flat[n] if n in flat else getattr(config, n) for n in names})

    def to_dict(self) -> dict[str, Any]:
        """Returns all options by flat name, as JSON-compatible values.

        Those that the chosen types do not have are there with their defaults.
        """
        found = {name: each.field.default for name, each in options_of(type(self)).items()}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            found |= value.to_dict() if _TYPES in field.metadata else {field.name: value}
        return found


def _chosen(field: dataclasses.Field, options: Mapping[str, Any]) -> type[Options] | None:
    """Returns the type of a part that options choose; None for a field that is an option."""
    types = field.metadata.get(_TYPES)
    if types is None:
        return None
    return types[0] if len(types) == 1 else field.metadata[_CHOOSE](options)


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Checks `value` against the field's type; numbers may arrive as int for float."""
    alternatives = typing.get_args(hint) if typing.get_origin(hint) is not Literal else (hint,)
    alternatives = alternatives or (hint,)
    if value is None and type(None) in alternatives:
        return None
    for kind in alternatives:
        if typing.get_origin(kind) is Literal:
            if value in typing.get_args(kind):
                return value
            choices = ", ".join(typing.get_args(kind))
            raise validation.UsageError(f"{name} must be one of {choices}; got {value!r}.")
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            if not abs(value) <= sys.float_info.max:  # An integer of TOML may be larger.
                raise validation.UsageError(f"{name} must be finite, got {str(value)[:50]}.")
            return float(value)
        if kind is not type(None) and type(value) is kind:
            return value
    expected = " or ".join(k.__name__ for k in alternatives if k is not type(None))
    raise validation.UsageError(f"{name} must be of type {expected}, got {value!r}.")


def absolute_path(name: str, value: Any) -> Any:
    """Returns the value of an option; if it names a file, as an absolute path."""
    if name not in FILES or value in FILES[name]:
        return value
    return table_files.absolute(value)
