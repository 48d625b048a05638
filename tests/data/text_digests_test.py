"""A corpus is recognised by its digests as by its texts."""

import random
import unicodedata

import numpy as np
import pytest

from tff_dpftrl.data import text_digests, user_text

_WORDS = [a + b for a in "bdfgkmnprt" for b in "aeiou"]


def _corpus(texts_of):
    return user_text.UserText.from_mapping("corpus", texts_of)


def _random(rng, users=30):
    return {
        f"user{i}": [
            " ".join(rng.choices(_WORDS, k=rng.randint(1, 15))) for _ in range(rng.randint(1, 4))
        ]
        for i in range(users)
    }


def _mixed(rng, public):
    """Users with texts of their own, copied, copied in part, renamed, or in other letters."""
    made = {}
    for user, texts in public.items():
        other = list(_random(rng, 1).values())[0]
        kind = rng.randrange(5)
        name = user if kind == 4 else f"other {user}"
        made[name] = [
            other,
            texts,
            [*texts, *other],
            [f"  {text.upper()} " for text in texts],
            [other[0], texts[0]],
        ][kind]
    return made


@pytest.mark.parametrize("seed", range(20))
def test_they_count_what_the_texts_themselves_share(seed):
    rng = random.Random(seed)
    public = _random(rng)
    protected = _corpus(_mixed(rng, public))
    digests = text_digests.TextDigests.of(_corpus(public))
    expected = user_text.shared_users(_corpus(public), protected)
    assert digests.shared_users(protected) == expected > 0


def test_they_are_read_as_they_were_written_and_tell_no_text(tmp_path):
    public = _corpus({"ada": ["a secret nobody knows " * 6]})
    digests = text_digests.TextDigests.of(public)
    digests.save(tmp_path / "digests.npz")
    content = (tmp_path / "digests.npz").read_bytes()
    assert b"secret" not in content and b"ada" not in content
    again = text_digests.TextDigests.load(tmp_path / "digests.npz")
    assert again.shared_users(public) == 1
    other = text_digests.TextDigests.of(public)
    assert other.key != digests.key and not np.intersect1d(other.texts, digests.texts).size


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_copy_in_another_normal_form_is_a_copy(form):
    text = unicodedata.normalize(form, "Über Köln und Zürich führen schöne Straßen " * 4)
    public, protected = _corpus({"x": [text], "y": ["so"]}), {"a": [], "b": ["nein"]}
    key = bytes(16)
    of_before = text_digests.TextDigests(  # Made by a version that did not normalise.
        key,
        np.array([text_digests._digest(key, "", " ".join(text.lower().split()))], np.uint64),
        np.zeros([0], np.uint64),
    )
    for other in "NFC", "NFD":
        users = _corpus(protected | {"a": [unicodedata.normalize(other, text)]})
        assert user_text.shared_users(public, users) == 1
        assert text_digests.TextDigests.of(public).shared_users(users) == 1
        assert of_before.shared_users(users) == (form == other or form == "NFC")


def test_a_sample_of_a_large_corpus_still_finds_copies(monkeypatch):
    monkeypatch.setattr(text_digests, "_MOST", 40)
    public = _random(random.Random(3), users=100)
    long = {user: [f"{text} {text} {text}" * 3 for text in texts] for user, texts in public.items()}
    digests = text_digests.TextDigests.of(_corpus(long))
    assert len(digests.texts) == len(digests.texts_of_users) == 40
    renamed = {f"other {user}": texts for user, texts in long.items()}
    found = digests.shared_users(_corpus(renamed))
    # Each of the 40 texts that are kept is somebody's; of few people two or more are.
    assert 20 <= found <= 40
    strangers = {f"stranger {i}": [f"{i} " * 30] for i in range(100)}
    assert digests.shared_users(_corpus(strangers)) == 0


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "digests.npz").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read.*Restore it"):
        text_digests.TextDigests.load(tmp_path / "digests.npz")
