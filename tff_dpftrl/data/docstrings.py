"""The corpus "docs": docstrings of the installed packages. A user is a module.

It is real text by real authors, on any machine, without a download. The users are the
modules of the installed packages. The standard library is kept apart, as the
public text from which the vocabulary is made (`tff_dpftrl.data.vocabulary`), so
that nothing but the packages' text is protected and nothing of it is given away.

A user's text must not depend on the other users, or the guarantee for one user would not hold
for its effect on the text of others. So text is compared with public text and with the same
user's text, never with other users'. A docstring is left out if more than half of its words are
in sentences that the standard library has, and a sentence counts once per module. Vendored
packages, and a few known copies (`_COPIES`), are left out by their names. Modules still share
some sentences; such a sentence is protected as part of each module, not of all of them together.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from tff_dpftrl import durable_files, validation
from tff_dpftrl.data import docstring_extraction, jsonl, tables, user_text

MIN_WORDS = 100
"""Least number of words of a module that is a user, after the removal of public text."""

_FORMAT = 2
"""Raise it when the same environment yields another corpus: it names cache files."""

_SKIPPED_FOLDERS = frozenset(
    ["__pycache__", "dist-packages", "site-packages", "test", "testing", "tests", "lib2to3"]
    # Copies of other packages.
    + ["_vendor", "_vendored", "extern", "externals", "third_party", "vendor", "vendored"]
)
_COPIES = frozenset(
    [
        "tensorboard.compat",  # Parts of TensorFlow.
        "tensorflow._api",  # The names of tensorflow.python.
        "tensorflow.python.keras",  # An earlier keras.
        "tensorflow_probability.python.internal.backend",  # tensorflow.python.ops.
        "tensorflow_probability.substrates",  # tensorflow_probability.python for JAX and NumPy.
        "tf_keras",  # keras.
    ]
)
"""Packages and folders that copy text of other packages, in the pinned environment."""

_DIGEST_BYTES = hashlib.sha256().digest_size
_THIS_PACKAGE = "tff_dpftrl"
_MAX_PROCESSES = 4

Progress: TypeAlias = Callable[[int, int], None]
"""Callback with the number of files read so far, and the number of all files."""

_WORD = re.compile(r"\w+")


def read(
    packages: Sequence[str] | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> user_text.UserText:
    """Returns the docstrings of the installed packages by module.

    The first call in an environment reads its source files, in some ten seconds. The result is
    cached under a name made of the names and versions of all installed packages. `packages` are
    top-level names; None reads all packages in folders called site-packages or dist-packages.
    `cache_dir` is `$XDG_CACHE_HOME/tff_dpftrl` or `~/.cache/tff_dpftrl` by default. A user is a
    module with at least 100 words, and its id is the dotted name.
    """
    roots = _package_roots()
    installed = sorted({name for root in roots for name in os.listdir(root)})
    if packages is not None:
        for package in packages:
            if not {package, f"{package}.py"} & set(installed):
                raise validation.UsageError(
                    f"packages: {package!r} is not installed; install it or leave it out."
                )
        chosen = frozenset(packages)
    else:
        chosen = None
    key = [sys.version, installed, sorted(chosen) if chosen is not None else None]

    def extract() -> dict[str, list[str]]:
        files = [
            (module, path)
            for root in roots
            for module, path in _source_files(root, chosen)
            if module.partition(".")[0] != _THIS_PACKAGE
        ]
        public = read_standard_library(cache_dir=cache_dir)
        return _modules(files, public=public.texts(), progress=progress)

    corpus = _cached("docs", key, cache_dir, extract)
    return user_text.require_several_users(corpus)


def read_standard_library(*, cache_dir: str | os.PathLike[str] | None = None) -> user_text.UserText:
    """Returns the docstrings of Python's standard library by module, as `read` does.

    The first call with a version of Python takes some two seconds.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])

    def extract() -> dict[str, list[str]]:
        return _modules(_source_files(root, None), public=(), progress=None)

    return _cached("standard-library", [sys.version], cache_dir, extract)


def _package_roots() -> list[pathlib.Path]:
    folders = (pathlib.Path(entry) for entry in sys.path)
    return [
        folder
        for folder in dict.fromkeys(folders)
        if folder.name in ("site-packages", "dist-packages") and folder.is_dir()
    ]


def _source_files(root: pathlib.Path, chosen: frozenset[str] | None) -> list[tuple[str, str]]:
    """Returns (module name, path) of the source files below `root`, sorted by name."""
    sources = []
    for folder, subfolders, files in os.walk(root):
        parts = pathlib.Path(folder).relative_to(root).parts
        subfolders[:] = [
            name
            for name in subfolders
            if name.isidentifier()
            and name not in _SKIPPED_FOLDERS
            and (".".join((*parts, name)) not in _COPIES or (not parts and chosen is not None))
            and (parts or chosen is None or name in chosen)
        ]
        for file in files:
            name, extension = os.path.splitext(file)
            if extension != ".py" or (not parts and chosen is not None and name not in chosen):
                continue
            module = ".".join(parts if name == "__init__" else (*parts, name))
            sources.append((module, os.path.join(folder, file)))
    return sorted(sources)


def _modules(
    files: Sequence[tuple[str, str]], public: Iterable[str], progress: Progress | None
) -> dict[str, list[str]]:
    """Reads the files independently, and removes docstrings that are mostly public text."""
    public_keys = {_sentence_key(sentence) for sentence in public}
    modules: dict[str, list[str]] = {}
    with contextlib.closing(_extract_all([path for _, path in files])) as extracted:
        for done, ((module, _), docstrings) in enumerate(
            zip(files, extracted, strict=True), start=1
        ):
            kept: dict[bytes, tuple[str, int]] = {}  # Sentences, with their numbers of words.
            for sentences in docstrings:
                by_key = {_sentence_key(text): text for text in sentences}
                counted = {key: (text, len(_WORD.findall(text))) for key, text in by_key.items()}
                repeated = sum(n for key, (_, n) in counted.items() if key in public_keys)
                if 2 * repeated <= sum(n for _, n in counted.values()):
                    kept.update(counted)
            if sum(n for _, n in kept.values()) >= MIN_WORDS:
                modules.setdefault(module, [text for text, _ in kept.values()])
            if progress is not None:
                progress(done, len(files))
    return modules


def _sentence_key(sentence: str) -> bytes:
    normal = " ".join(_WORD.findall(sentence.lower()))
    return hashlib.blake2b(normal.encode("utf-8"), digest_size=8).digest()


def _extract_all(paths: Sequence[str]) -> Iterator[list[list[str]]]:
    """Yields the docstrings of each file in order, read by a few child processes.

    The children are plain subprocesses, not multiprocessing: they neither import the caller's
    `__main__` nor inherit TensorFlow's threads. They end by themselves when this process dies, as
    nobody reads their output. Each has a new session, so that Ctrl-C in the terminal does not
    reach it.
    """
    count = max(1, min(_MAX_PROCESSES, os.cpu_count() or 1, len(paths) // 100))
    command = [sys.executable, "-I", docstring_extraction.__file__]
    children = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for _ in range(count)
    ]
    try:
        for index, child in enumerate(children):
            json.dump(list(paths[index::count]), child.stdin)
            child.stdin.close()
        for index in range(len(paths)):
            line = children[index % count].stdout.readline()
            if not line:
                raise RuntimeError(f"A process that extracts docstrings died at {paths[index]}.")
            yield json.loads(line)
    finally:
        for child in children:
            child.kill()
            child.stdout.close()
            child.wait()


def _cached(
    name: str,
    key: object,
    cache_dir: str | os.PathLike[str] | None,
    extract: Callable[[], dict[str, list[str]]],
) -> user_text.UserText:
    """Returns the cached corpus for `key`, extracting and caching it if needed."""
    if cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        cache_dir = os.path.join(base, _THIS_PACKAGE)
    digest = hashlib.sha256(json.dumps([_FORMAT, MIN_WORDS, key]).encode("utf-8")).hexdigest()
    path = pathlib.Path(cache_dir, f"{name}-{digest[:16]}.jsonl.gz")
    if path.exists():
        with contextlib.suppress(ValueError):  # A damaged cache file is made anew.
            return _name_corpus(name, jsonl.read(path), path)
    # What the file's reader refuses would be extracted anew each time.
    extracted = {
        user_id: [text for text in texts if tables.damage(text) is None]
        for user_id, texts in extract().items()
    }
    corpus = _name_corpus(name, user_text.UserText.from_mapping(name, extracted), path)
    with contextlib.suppress(OSError):  # An unwritable cache costs time, nothing else.
        jsonl.write(corpus, path)
    return corpus


def _name_corpus(name: str, corpus: user_text.UserText, path: pathlib.Path) -> user_text.UserText:
    return user_text.UserText(
        name,
        "one module of an installed package",
        corpus.user_ids,
        corpus.read_examples,
        remember=functools.partial(_remember, path),
    )


def _remember(corpus_path: pathlib.Path, name: str, compute: Callable[[], bytes]) -> bytes:
    """Returns a value that depends on the texts, cached beside the corpus if possible."""
    key = hashlib.sha256(name.encode("utf-8")).hexdigest()[:16]
    path = corpus_path.with_name(f"{corpus_path.name.partition('.')[0]}-{key}.kept")
    with contextlib.suppress(OSError):
        kept = path.read_bytes()
        digest, value = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
        if digest == hashlib.sha256(value).digest():  # Else it is damaged.
            return value
    value = compute()
    with contextlib.suppress(OSError):
        durable_files.write(path, hashlib.sha256(value).digest() + value)
    return value
