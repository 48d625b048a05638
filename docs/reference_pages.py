"""Pages of the site's reference, made from the code.

Commands come from their parsers, keys of a configuration from its fields, metrics from their
tables, and names from their modules.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import types
import typing
from collections.abc import Iterator
from importlib import resources

import tff_dpftrl
from tff_dpftrl.cli import main as main_lib
from tff_dpftrl.finetuning import config as finetuning_config
from tff_dpftrl.runtime.actors import population
from tff_dpftrl.runtime.status import metrics as status_metrics
from tff_dpftrl.runtime.status import observations
from tff_dpftrl.runtime.tasks import task_config
from tff_dpftrl.training import composed, metrics_columns, options
from tff_dpftrl.training import config as training_config

_CONFIGS = {
    "`train`, `sweep` and `pretrain`": training_config.TrainingConfig,
    "`task new`": task_config.TaskConfig,
    "`finetune`": finetuning_config.FinetuningConfig,
}
_OTHERS = ("tff_dpftrl.execution.tff_names",)  # TFF's names.


def all_pages() -> Iterator[tuple[str, str]]:
    """Yields path and text of each page that is made from the code."""
    yield from _commands()
    yield "reference/configuration.md", _configuration()
    yield "reference/metrics.md", _metrics()
    yield from _python()


def _plain(text: object) -> str:
    """Escapes a text for Markdown, also within a table; code stays code, and pages get links."""
    parts = re.split(r"(`[^`]+`)|(docs/[\w/]+\.md)", " ".join(str(text).split()))
    for i in range(0, len(parts) - 1, 3):
        code, page = parts[i + 1 : i + 3]
        parts[i + 1] = (code or "").replace("|", r"\|")
        parts[i + 2] = f"[{page}](/{page})" if page else ""
    parts[::3] = [re.sub(r"([\\`*_{}\[\]<>#|~$])", r"\\\1", part) for part in parts[::3]]
    return "".join(parts)


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns a command's parser and those of its parts, by what is typed."""
    found = {parser.prog: parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                found |= parsers(part)
    return found


def _commands() -> Iterator[tuple[str, str]]:
    every = parsers(main_lib._build_parser())
    index = ["# Commands", "", "The same texts as `tff-dpftrl COMMAND --help`.", ""]
    for title, about in main_lib._GROUPS.items():
        rows = [(f"[`{name}`](commands/{name}.md)", _plain(about[name])) for name in about]
        index += [f"## {title}", "", _table(("command", "what it does"), rows)]
        for name in about:
            sections = [p for prog, p in every.items() if prog.split()[1:2] == [name]]
            text = "\n".join(map(_command, sections)).replace("## ", "# ", 1)
            yield f"reference/commands/{name}.md", text
    yield "reference/commands.md", "\n".join([*index, "```text", main_lib._JOURNEY + "```\n"])


def _command(parser: argparse.ArgumentParser) -> str:
    formatter = argparse.HelpFormatter(parser.prog, width=88)
    formatter.add_usage(parser.usage, parser._actions, (), "")
    lines = [f"## {parser.prog}", "", "```text", formatter.format_help().strip(), "```", ""]
    lines += [_block(parser.description)]
    for group in parser._action_groups:
        rows = [
            (_invocation(action), _plain(action.help % {**vars(action), "prog": parser.prog}))
            for action in group._group_actions
            if action.help and action.help != argparse.SUPPRESS
        ]
        if rows:
            about = "" if not group.description else _plain(group.description) + "\n\n"
            title = f"**{group.title[:1].upper()}{group.title[1:]}**\n\n"
            lines.append(title + about + _table(("option", "meaning"), rows))
    return "\n".join([*lines, _block(parser.epilog)])


def _invocation(action: argparse.Action) -> str:
    formatter = argparse.HelpFormatter("")
    return f"`{formatter._format_action_invocation(action)}`".replace("|", r"\|")


def _block(text: str | None) -> str:
    """Keeps lines that are laid out, such as examples, and lets others flow."""
    parts = []
    for part in (text or "").split("\n\n"):
        is_laid_out = any(line.startswith(" ") for line in part.splitlines())
        parts.append(f"```text\n{part.rstrip()}\n```\n" if is_laid_out else _plain(part) + "\n")
    return "\n".join(parts)


def _configuration() -> str:
    lines = [
        "# Keys of a configuration",
        "",
        "A TOML file for `--config` has one key an option, at the top or, for order's sake, in "
        "tables of any name. A key and its flag have one name: `num_rounds = 100` is "
        "`--num-rounds 100`. A flag overrules the file.",
        "",
    ]
    configs = [(f"`{name}`", _summary(name)) for name in options.built_in_configs()]
    lines += ["## Configurations of the package", "", "`--config NAME` takes one of them.", ""]
    lines += [_table(("name", "what it runs"), configs)]
    for commands, kind in _CONFIGS.items():
        lines += [f"## Keys of {commands}", ""]
        fields = composed.options_of(kind).values()
        for group in dict.fromkeys(field.metadata["group"] for field, _ in fields):
            rows = [_key(*each) for each in fields if each.field.metadata["group"] == group]
            lines += [f"**{group.capitalize()}**", ""]
            lines += [_table(("key", "type", "default", "meaning"), rows)]
    return "\n".join(lines)


def _summary(name: str) -> str:
    """Returns the first paragraph of the comment that a config of the package begins with."""
    file = resources.files("tff_dpftrl.training") / "configs" / f"{name}.toml"
    lines = file.read_text(encoding="utf-8").splitlines()
    head = itertools.takewhile(lambda line: line.startswith("# "), lines)
    return _plain(" ".join(line.removeprefix("# ") for line in head))


def _key(field: dataclasses.Field, hint: object) -> tuple[str, ...]:
    default = "" if field.default in (None, "") else f"`{json.dumps(field.default)}`"
    return f"`{field.name}`", _plain(_kind(hint)), default, _plain(field.metadata["help"])


def _kind(hint: object) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _kind(typing.get_args(hint)[0])  # The other one is None.
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(hint, str(hint))


def _metrics() -> str:
    columns = [
        (f"`{c.name}`", _plain(c.meaning), "exact" if c.is_exact else "")
        for c in metrics_columns.COLUMNS
    ]
    return "\n".join(
        [
            "# Metrics",
            "",
            "## Columns of `private/metrics.csv`",
            "",
            "One row a round. *Exact*: a figure of the training cohort, which no guarantee covers "
            "and `metrics.csv` has not; see "
            "[what a run's folder holds](../docs/reference/results_folder.md).",
            "",
            _table(("column", "meaning", ""), columns),
            "## Metrics of a server",
            "",
            "`/metrics` of a server's status page has them, for Prometheus.",
            "",
            _table(("metric", "kind", "meaning"), _of_a_server()),
        ]
    )


def _of_a_server() -> list[tuple[str, ...]]:
    task = population.Task("task", population.RoundSettings(10), None, None)  # type: ignore
    seen = observations.Observations(population.Population("population", (task,)))
    found = status_metrics.registry(seen).collect()
    return [(f"`{family.name}`", family.type, _plain(family.documentation)) for family in found]


def _python() -> Iterator[tuple[str, str]]:
    """Yields a page for each package, with its modules, and one with the names at the top."""
    top = {n: tff_dpftrl._MODULE_OF.get(n) for n in tff_dpftrl.__all__}
    rows = []
    for name, where in top.items():
        if where:
            module, _, there = where.partition(":")
            role = f"{{py:obj}}`{name} <tff_dpftrl.{module}.{there or name}>`"
            first = inspect.getdoc(getattr(tff_dpftrl, name)).split("\n\n")[0]
            rows.append((role, _plain(first)))
    yield (
        "reference/python.md",
        "# Python\n\n" + _table(("name in `tff_dpftrl`", "what it is"), rows),
    )
    packages: dict[str, list[str]] = {}
    for found in pkgutil.walk_packages(tff_dpftrl.__path__, "tff_dpftrl."):
        package, _, name = found.name.rpartition(".")
        is_reference = not (found.ispkg or name.endswith("_pb2") or found.name in _OTHERS)
        if is_reference and not package.endswith(".cli"):
            packages.setdefault(package, []).append(found.name)
    for package, modules in packages.items():
        name = package.partition(".")[2] or "tff_dpftrl"
        lines = [f"# {name}", "", _block(inspect.getdoc(importlib.import_module(package)))]
        for module in modules:
            lines += [f"## {module.rpartition('.')[2]}", "", "```{eval-rst}"]
            lines += [f".. automodule:: {module}", "```", ""]
        yield f"reference/python/{name}.md", "\n".join(lines)
