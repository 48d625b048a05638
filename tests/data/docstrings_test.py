"""Tests of tff_dpftrl.data.docstrings and docstring_extraction."""

import pathlib
import subprocess
import sys
import textwrap

import pytest

from tests.data import shared_docstrings
from tff_dpftrl.data import docstring_extraction, docstrings, user_text

standard_library = shared_docstrings.standard_library


def _prose(topic, count):
    return [f"Sentence {topic} number {i} tells what no other text says." for i in range(count)]


def _module(*docs):
    functions = (f'def f{i}():\n    """{doc}"""\n' for i, doc in enumerate(docs))
    return "\n".join(functions)


@pytest.fixture(name="site")
def _site(tmp_path, monkeypatch):
    """Adds files to the only site-packages on sys.path; the standard library is tiny."""
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    kept = [entry for entry in sys.path if "-packages" not in pathlib.Path(entry).name]
    monkeypatch.setattr(sys, "path", [*kept, str(folder)])
    standard_library = tmp_path / "lib" / "python"
    standard_library.mkdir()
    (standard_library / "public.py").write_text(_module(*_prose("public", 20)))
    monkeypatch.setattr(
        docstrings.sysconfig, "get_paths", lambda: {"stdlib": str(standard_library)}
    )

    def add(name, source):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")

    return add


@pytest.fixture(name="cache")
def _cache(tmp_path):
    return tmp_path / "cache"


def test_sentences():
    docstring = """Returns the sum of a list. It may be
        empty. See `math.fsum` for floats.

        Args:
          values: The numbers that are to be added,
            wrapped here.
        -----
        >>> total([1, 2])
        3

        * First item of a list
        * second one, which ends here
        ```
        some code that is skipped
        ```
        Short one.
        x = {1: 2, 3: 4, 5: 6}  # a b c d
        """
    assert docstring_extraction.sentences(docstring) == [
        "Returns the sum of a list.",
        "It may be empty.",
        "See `math.fsum` for floats.",
        "values: The numbers that are to be added, wrapped here.",
        "* First item of a list",
        "* second one, which ends here",
    ]


def test_docstrings_of_a_file_in_order(tmp_path):
    source = '''
        """{filler}"""
        class A:
            """Class docstring comes second."""
            x = """a string that is no docstring at all"""
            async def g(self):
                """Method docstring comes third."""
                def inner():
                    """Inner docstring comes fourth."""
        if True:
            def h():
                """Conditional docstring comes fifth."""
    '''
    filler = " ".join(["word"] * 100) + "."
    path = tmp_path / "m.py"
    path.write_text(textwrap.dedent(source).format(filler=filler))
    found = docstring_extraction.docstrings_of_file(str(path))
    assert [sentences[0].split()[0] for sentences in found] == [
        *("word", "Class", "Method", "Inner", "Conditional")
    ]


@pytest.mark.parametrize(
    "content", [b'"""' + b"many words here " * 99 + b'"""\nprint 1', b"\xff\xfe", b"x = 1\n", b""]
)
def test_files_that_are_no_use_yield_nothing(tmp_path, content):
    path = tmp_path / "m.py"
    path.write_bytes(content)
    assert docstring_extraction.docstrings_of_file(str(path)) == []
    assert docstring_extraction.docstrings_of_file(str(tmp_path / "none.py")) == []


def test_users_are_modules_with_enough_words(site, cache):
    site("b/__init__.py", _module(*_prose("b", 20)))
    site("b/long.py", _module(*_prose("long", 20)))
    site("b/short.py", _module(*_prose("short", 5)))
    site("b/tests/t.py", _module(*_prose("test", 20)))
    site("a.py", _module(*_prose("a", 20)))
    site("not-a-package/x.py", _module(*_prose("x", 20)))
    corpus = docstrings.read(cache_dir=cache)
    assert corpus.user_ids == ("a", "b", "b.long")
    assert corpus.examples("a") == _prose("a", 20)
    assert corpus.name == "docs"


def test_our_own_modules_are_left_out(site, cache):
    for name in ("a", "b", "tff_dpftrl"):
        site(f"{name}.py", _module(*_prose(name, 20)))
    assert docstrings.read(cache_dir=cache).user_ids == ("a", "b")


def test_a_users_text_does_not_depend_on_other_users(site, cache, tmp_path):
    shared, own = _prose("shared", 20), _prose("own", 20)
    site("a.py", _module(*shared))
    site("copy.py", _module(*shared))
    site("mixed.py", _module(" ".join([*shared[:11], *own[:9]]), " ".join(own[9:])))
    both = docstrings.read(cache_dir=cache)
    assert both.user_ids == ("a", "copy", "mixed")
    assert both.examples("copy") == shared
    assert both.examples("mixed") == [*shared[:11], *own]
    (tmp_path / "lib" / "site-packages" / "a.py").unlink()
    without = docstrings.read(cache_dir=cache)
    assert without.user_ids == ("copy", "mixed")
    for user in without.user_ids:
        assert without.examples(user) == both.examples(user)


def test_a_sentence_counts_once_per_module(site, cache):
    site("a.py", _module(*_prose("a", 10), *_prose("a", 20)))
    site("b.py", _module(*_prose("b", 20)))
    assert docstrings.read(cache_dir=cache).examples("a") == _prose("a", 20)


def test_mostly_public_docstrings_are_left_out_whole(site, cache):
    public, own = _prose("public", 20), _prose("own", 30)
    site("mixed.py", _module(" ".join([*public[:11], *own[:9]]), " ".join([*own[9:], *public[:5]])))
    site("other.py", _module(*_prose("other", 20)))
    assert docstrings.read(cache_dir=cache).examples("mixed") == [*own[9:], *public[:5]]


def test_copies_are_known_by_their_names(site, cache):
    for name in ("a/_vendor/b.py", "a/x.py", "tensorflow/python/keras/c.py", "b.py"):
        site(name, _module(*_prose(name, 20)))
    site("tf_keras/y.py", _module(*_prose("y", 20)))
    assert docstrings.read(cache_dir=cache).user_ids == ("a.x", "b")
    chosen = docstrings.read(["tf_keras", "b"], cache_dir=cache)
    assert chosen.user_ids == ("b", "tf_keras.y")


def test_what_the_standard_library_says_is_left_out(site, cache):
    site("vendored.py", _module(" ".join(_prose("public", 20))))
    for name in ("a", "b"):
        site(f"{name}.py", _module(*_prose(name, 20)))
    assert docstrings.read_standard_library(cache_dir=cache).user_ids == ("public",)
    assert docstrings.read(cache_dir=cache).user_ids == ("a", "b")


def test_packages_can_be_chosen(site, cache):
    for name in ("a.py", "b/x.py", "c/x.py"):
        site(name, _module(*_prose(name, 20)))
    assert docstrings.read(["a", "c"], cache_dir=cache).user_ids == ("a", "c.x")
    with pytest.raises(ValueError, match="packages: 'q' is not installed"):
        docstrings.read(["a", "q"], cache_dir=cache)
    with pytest.raises(ValueError, match="single user, 'a'"):
        docstrings.read(["a"], cache_dir=cache)


def test_the_cache_is_used_until_the_environment_changes(site, tmp_path):
    for name in ("a", "b"):
        site(f"{name}.py", _module(*_prose(name, 20)))
    calls = []
    first = docstrings.read(cache_dir=tmp_path, progress=lambda *done: calls.append(done))
    assert calls == [(1, 2), (2, 2)]
    assert len(list(tmp_path.glob("*.jsonl.gz"))) == 2
    calls.clear()
    again = docstrings.read(cache_dir=tmp_path, progress=lambda *done: calls.append(done))
    assert not calls
    assert [again.examples(user) for user in again.user_ids] == [
        first.examples(user) for user in first.user_ids
    ]
    assert (again.name, again.user_unit) == (first.name, first.user_unit)
    site("c.py", _module(*_prose("c", 20)))
    assert docstrings.read(cache_dir=tmp_path).user_ids == ("a", "b", "c")


def test_texts_that_cannot_be_read_again_are_left_out(site, cache, monkeypatch):
    prose = _prose("a", 20)
    for name in ("a", "b"):
        site(f"{name}.py", _module(*prose, "This sentence has a strange \\0 character in it."))
    assert docstrings.read(cache_dir=cache).examples("a") == prose
    monkeypatch.setattr(docstrings, "_modules", None)  # The cache is not made anew.
    assert docstrings.read(cache_dir=cache).examples("b") == prose


def test_a_damaged_or_unwritable_cache_does_no_harm(site, tmp_path):
    for name in ("a", "b"):
        site(f"{name}.py", _module(*_prose(name, 20)))
    docstrings.read(cache_dir=tmp_path)
    for path in tmp_path.glob("*.jsonl.gz"):
        path.write_bytes(b"not gzip")
    assert docstrings.read(cache_dir=tmp_path).user_ids == ("a", "b")
    (tmp_path / "file").write_text("")
    assert docstrings.read(cache_dir=tmp_path / "file").user_ids == ("a", "b")


def test_what_was_computed_from_the_texts_is_kept_beside_them(site, tmp_path):
    for name in ("a", "b"):
        site(f"{name}.py", _module(*_prose(name, 20)))
    calls = []

    def remembered(name, value, cache_dir=tmp_path):
        corpus = docstrings.read(cache_dir=cache_dir).select(["a"])
        return corpus.remember(name, lambda: calls.append(name) or value)

    assert remembered("x", b"1") == b"1" and remembered("y", b"2") == b"2"
    assert remembered("x", b"3") == b"1" and remembered("y", b"4") == b"2"
    assert calls == ["x", "y"]
    for path in tmp_path.glob("*.kept"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert remembered("x", b"5") == b"5" and remembered("x", b"6") == b"5"
    (tmp_path / "file").write_text("")
    assert remembered("x", b"7", tmp_path / "file") == b"7"
    site("c.py", _module(*_prose("c", 20)))  # Another environment.
    assert remembered("x", b"8") == b"8"


def test_the_default_cache_follows_xdg(site, monkeypatch, tmp_path):
    del site
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    docstrings.read_standard_library()
    assert len(list((tmp_path / "tff_dpftrl").glob("standard-library-*.jsonl.gz"))) == 1


def test_the_standard_library_is_found(standard_library):
    corpus = docstrings.read_standard_library(cache_dir=standard_library)
    assert isinstance(corpus, user_text.UserText)
    # 319 modules and 229,000 words with Python 3.11.
    assert len(corpus) > 150
    assert sum(len(text.split()) for text in corpus.texts()) > 100_000
    assert "argparse" in corpus.user_ids


def test_nothing_is_imported_and_no_child_is_left(site, cache, monkeypatch):
    site("evil.py", "raise SystemExit('imported')\n" + _module(*_prose("e", 20)))
    for name in [f"m{i}" for i in range(250)]:
        site(f"{name}.py", _module(*_prose(name, 12)))
    children = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            children.append(self)

    monkeypatch.setattr(docstrings.subprocess, "Popen", Popen)

    class StopError(Exception):
        pass

    def stop(done, total):
        assert total == 251
        if done == 10:
            raise StopError

    with pytest.raises(StopError):
        docstrings.read(cache_dir=cache, progress=stop)
    assert len(children) >= 2
    assert all(child.returncode is not None for child in children)
    assert len(docstrings.read(cache_dir=cache)) == 251
    assert all(child.returncode is not None for child in children)
    assert "evil" not in sys.modules


@pytest.mark.slow
def test_this_environment_makes_a_large_corpus(tmp_path):
    corpus = docstrings.read(cache_dir=tmp_path)
    # 4,111 modules and 3.3 million words in the pinned environment.
    assert len(corpus) > 2000
    assert sum(len(text.split()) for text in corpus.texts()) > 2_000_000
    assert not any(user.startswith("tff_dpftrl.") for user in corpus.user_ids)
