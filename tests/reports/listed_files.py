"""Checks that a results folder, as a test's run left it, has the files that the table names."""

import csv
import pathlib
import re

from tff_dpftrl import json_text
from tff_dpftrl.reports import files, results

_PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "reference" / "results_folder.md"


def explained() -> dict[str, str]:
    """Verdicts of the reference page by the names in the first cell of a row."""
    found = {}
    for line in _PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            names = re.findall(r"`(.*?)`", cells[0])
            stem = names[0].rpartition(".")[0]  # Of names whose other endings follow.
            for name in names:
                name = stem + name if name.startswith(".") and name != names[0] else name
                found.setdefault(name, cells[2].replace("*", ""))
    return found


def check(folder: pathlib.Path) -> dict[str, files.Publish]:
    """Checks that table and page know all files, and that none flatters itself.

    Args:
      folder: A results folder.

    Returns:
      Whether each file may be published, by name.
    """
    found = results.read(folder)
    listed = files.present(folder, found.kind, has_guarantee=found.has_guarantee)
    publish = {file.name: file.publish for file in listed}
    named = {path.name + "/" * path.is_dir() for path in folder.iterdir()}
    assert named <= publish.keys(), named - publish.keys()
    for path in (folder / "private").rglob("*"):
        name = path.relative_to(folder / "private").as_posix()
        name = re.sub(r"round_.*\.npz", "round_….npz", name)
        name = "tensorboard/" if name.startswith("tensorboard/") else name
        assert path.is_dir() or name in explained(), name
    exact = {
        value
        for name in ("metrics.csv", "private/metrics.csv")
        if (folder / name).exists()
        for row in csv.DictReader((folder / name).read_text().splitlines())
        for column, value in row.items()
        if column.startswith("eval_") and len(value) >= 8
    }
    if (folder / "config.json").exists():
        facts = json_text.read_object(folder / "config.json")["facts"]
        exact |= {
            str(facts[name]) for name in facts if name in ("pretrained_top1", "pretrained_loss")
        }
    for name in (name for name, verdict in publish.items() if verdict == "yes"):
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            assert not [one for one in exact if one.encode() in content], name
    return publish
