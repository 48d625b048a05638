"""Makes a table or picture of the docs anew: `python experiments/make.py NAME [NAME ...]`.

manifest.toml says what each takes: commands, pretrained models, files. They are run in the root of
the repository; then `page.py` puts the results into docs/experiments.md, and the manifest gets the
commit of the code. What was interrupted goes on with the same command; to begin anew, remove
results/NAME. --list shows what there is, --dry-run what would be run.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
ROOT = _HERE.parent
MANIFEST = _HERE / "manifest.toml"
_MADE = ("results", "manifest.toml")
# What makes results, as git names it: their commit must have all of it.
_CODE = ("tff_dpftrl", "benchmarks", "experiments", *(f":!experiments/{x}" for x in _MADE))


def read() -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Reads the manifest.

    Returns:
      Commands of the pretrained models by name, and the other sections, with all their keys:
      commands, models, needs, results (below experiments/results), pictures (below docs), seeds
      and commit, which is empty where nothing was run yet.
    """
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10.
        import tomli as tomllib
    document = tomllib.loads(MANIFEST.read_text("utf-8"))
    models = document.pop("models")
    for name, section in document.items():
        for key in ("models", "needs", "pictures"):
            section.setdefault(key, [])
        is_folder = any(command.startswith("tff-dpftrl sweep") for command in section["commands"])
        section.setdefault("results", [name if is_folder else f"{name}.csv"])
    return models, document


def steps(models: Mapping[str, str], section: Mapping[str, Any]) -> list[str]:
    """Returns the commands that make a section, models that are missing first."""
    missing = [name for name in section["models"] if not (ROOT / "results" / name).exists()]
    return [*(models[name] for name in missing), *section["commands"]]


def arguments(command: str) -> list[str]:
    """Returns a command's words, with this interpreter for `python` and `tff-dpftrl`."""
    words = shlex.split(command)
    program = {"python": [], "tff-dpftrl": ["-m", "tff_dpftrl.cli.main"]}[words[0]]
    return [sys.executable, *program, *words[1:]]


def with_commit(text: str, name: str, commit: str) -> str:
    """Returns the manifest's text with another commit in one section."""
    section = re.compile(rf'(^\[{name}\]\n(?:(?!\[).*\n)*?commit = ")[^"]*', re.MULTILINE)
    return section.sub(rf"\g<1>{commit}", text)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _make(name: str, commands: Sequence[str], commit: str) -> None:
    for command in [*commands, "python experiments/page.py"]:
        print(f"$ {' '.join(shlex.split(command))}", flush=True)
        subprocess.run(arguments(command), cwd=ROOT, check=True)
    MANIFEST.write_text(with_commit(MANIFEST.read_text("utf-8"), name, commit), encoding="utf-8")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="Section of the manifest.")
    parser.add_argument("--list", action="store_true", help="Show names, seeds and commits.")
    parser.add_argument("--dry-run", action="store_true", help="Show the commands only.")
    args = parser.parse_args()
    models, sections = read()
    if args.list:
        for name, section in sections.items():
            print(f"{name:32} {section['seeds']:4} seeds  {section['commit'] or 'not run yet'}")
        return
    if not args.names:
        parser.error("name what to make, or give --list.")
    for name in args.names:
        if name not in sections:
            parser.error(f"there is no {name!r} in {MANIFEST.name}; --list shows what there is.")
    if args.dry_run:
        for name in args.names:
            print("\n".join(" ".join(shlex.split(c)) for c in steps(models, sections[name])))
        return
    needed = dict.fromkeys(file for name in args.names for file in sections[name]["needs"])
    if missing := [file for file in needed if not (ROOT / file).exists()]:
        parser.error(f"put these below {ROOT} first: {', '.join(missing)}")
    if changes := _git("status", "--porcelain", "--untracked-files=no", "--", *_CODE):
        parser.error(f"commit your changes first, so that a commit has the code:\n{changes}")
    commit = _git("rev-parse", "--short=8", "HEAD")
    for name in args.names:
        try:
            _make(name, steps(models, sections[name]), commit)
        except subprocess.CalledProcessError as error:
            sys.exit(f"{name}: the last command ended with status {error.returncode}.")


if __name__ == "__main__":
    main()
