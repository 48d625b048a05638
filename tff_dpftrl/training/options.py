"""Options of a run before they are a config: from TOML files, flags and manifests."""

from __future__ import annotations

import difflib
import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

from tff_dpftrl import validation
from tff_dpftrl.runs import manifest
from tff_dpftrl.training import composed, language_config
from tff_dpftrl.training import config as config_lib

Config = TypeVar("Config", bound=composed.Options)

# Two ways to specify the noise: one that is given replaces the other.
_NOISE = {"noise_multiplier": "target_epsilon", "target_epsilon": "noise_multiplier"}
NOISY = (*_NOISE, "simulate_report_goal", "simulate_population")
"""Options for the amount of noise, which have no meaning with the mechanism 'none'."""


def config_from_mapping(
    values: Mapping[str, Any], source: str, kind: type[Config] = config_lib.TrainingConfig
) -> Config:
    """Builds a config, refusing unknown keys of a source, a file or the command line."""
    check_names(values, source, kind)
    return kind.of(**values)


def begun_from_mapping(
    values: Mapping[str, Any], source: str, kind: type[Config] = config_lib.TrainingConfig
) -> Config:
    """Builds the config of a begun run, perhaps of an earlier version of this package."""
    options = language_config.begun(values)
    check_names(options, source, kind)
    return kind.of_begun(**options)


def check_names(
    values: Mapping[str, Any], source: str, kind: type[Config] = config_lib.TrainingConfig
) -> None:
    """Refuses unknown keys; arguments and errors as for `config_from_mapping`."""
    known = kind.known()
    unknown = sorted(set(values) - known)
    if unknown:
        if _find(source).parent == _BUILT_IN:
            raise validation.UsageError(
                f"{source} is for another command: this one has no option {unknown[0]!r}. Name a "
                f"file, or one of {', '.join(built_in_configs(kind))}."
            )
        near = difflib.get_close_matches(unknown[0], known, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise validation.UsageError(
            f"{source} has the unknown option {unknown[0]!r}{meant}; known are: "
            f"{', '.join(sorted(known))}."
        )


def overrule(options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Overrules the options of a file, say, by flags, of which None stands for "not given".

    Naming `noise_multiplier` takes `target_epsilon` away, and the other way round; a mechanism
    takes the `strategy` away that would stand in its place. The mechanism 'none' takes noise
    multiplier and target away, and the larger run whose noise is simulated. Nothing is validated.
    """
    without = set(NOISY) if given.get("mechanism") == "none" else set()
    without |= {"strategy"} if given.get("mechanism") is not None else set()
    without |= {other for name, other in _NOISE.items() if given.get(name) is not None}
    kept = {name: value for name, value in options.items() if name not in without}
    return {name: value for name, value in (kept | dict(given)).items() if value is not None}


def of_begun_run(values: Mapping[str, Any], source: str) -> config_lib.TrainingConfig:
    """Returns the config of a training run, perhaps of an earlier version of this package."""
    options = dict(values)
    options.pop("engine", None)  # Earlier versions had two.
    return begun_from_mapping(options, source)


def of_manifest(known: manifest.Manifest, output: pathlib.Path) -> config_lib.TrainingConfig:
    """Returns the config of the training run in a folder."""
    known.check_kind(manifest.TRAINING, output)
    return of_begun_run(known.config, str(output / "config.json"))


_BUILT_IN = pathlib.Path(__file__).parent / "configs"


def built_in_configs(kind: type[composed.Options] | None = None) -> tuple[str, ...]:
    """Returns the names of the package's configs, sorted; only those with options of `kind`."""
    names = sorted(path.stem for path in _BUILT_IN.glob("*.toml"))
    if kind is None:
        return tuple(names)
    return tuple(name for name in names if kind.known().issuperset(_options_of_built_in(name)))


@functools.cache
def _options_of_built_in(name: str) -> frozenset[str]:
    return frozenset(read_toml(_BUILT_IN / f"{name}.toml"))


def _find(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a file that exists, or the config of the package with this name."""
    found = pathlib.Path(path)
    if not found.exists() and str(path) in built_in_configs():
        return _BUILT_IN / f"{path}.toml"
    return found


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the options of a TOML file; if there is none, of a config of the package.

    Options may stand at the top level or, for order's sake, in tables of any name: `[privacy]`
    followed by `clip_norm = 1.0` is the same as the latter alone. No option is validated.
    """
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10; only whoever has a TOML file needs it.
        import tomli as tomllib
    try:
        with open(_find(path), encoding="utf-8-sig") as file:
            document = tomllib.loads(file.read())
    except OSError as error:
        raise validation.UsageError(
            f"Cannot read the config file {path}: {error.strerror}. Name a file, or a config of "
            f"the package: {', '.join(built_in_configs())}."
        ) from error
    except ValueError as error:  # Not TOML, not UTF-8, or a number of thousands of digits.
        raise validation.UsageError(
            f"The config file {path} is not valid TOML: {error}."
        ) from error
    except RecursionError:
        raise validation.UsageError(f"The config file {path} is nested too deeply.") from None
    options: dict[str, Any] = {}
    for key, value in document.items():
        for name, entry in value.items() if isinstance(value, dict) else [(key, value)]:
            if name in options:
                raise validation.UsageError(
                    f"The config file {path} gives the option {name!r} twice."
                )
            options[name] = entry
    return options
