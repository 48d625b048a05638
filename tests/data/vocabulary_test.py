"""Tests of tff_dpftrl.data.vocabulary."""

import numpy as np
import pytest

from tests.data import shared_docstrings
from tff_dpftrl.data import jsonl, tokenizer, user_text, vocabulary

standard_library = shared_docstrings.standard_library


def _corpus():
    return user_text.UserText.from_mapping("m", {"u": ["b a a", "B c"], "v": ["a d"]})


def test_words_are_counted_and_ties_are_alphabetical():
    found = vocabulary.most_frequent(_corpus(), 10, source="test")
    assert found.words == ("a", "b", "c", "d")
    assert vocabulary.most_frequent(_corpus(), 2, source="test").words == ("a", "b")
    cased = vocabulary.most_frequent(_corpus(), 10, source="test", lower_case=False)
    assert cased.words == ("a", "B", "b", "c", "d")


def test_ids_are_those_of_tffs_stack_overflow():
    tff = pytest.importorskip("tensorflow_federated", reason="compares with TFF")
    found = vocabulary.most_frequent(_corpus(), 3, source="test")
    baseline = tff.simulation.baselines.stackoverflow
    theirs = baseline.word_prediction_preprocessing.get_special_tokens(len(found.words))
    assert vocabulary.PAD == theirs.padding
    assert [found.oov] == theirs.out_of_vocab
    assert found.bos == theirs.beginning_of_sentence
    assert found.eos == theirs.end_of_sentence
    assert found.size == len(found.words) + theirs.get_number_of_special_tokens()
    assert found.ids(["c", "a", "d", ""]) == [3, 1, found.oov, found.oov]


def test_the_source_says_who_calls_it_public(tmp_path):
    assert vocabulary.most_frequent(_corpus(), 3, source="a book").source == "a book"
    private = vocabulary.of_training_users(_corpus(), 3)
    assert private.words == ("a", "b", "c")
    assert private.source.endswith("training users of m, so NOT covered")
    assert not private.is_public
    jsonl.write(_corpus(), tmp_path / "c.jsonl")
    (tmp_path / "w.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match="size must be given"):
        vocabulary.from_file(tmp_path / "c.jsonl")
    for name in ("c.jsonl", "w.txt"):
        found = vocabulary.from_file(tmp_path / name, 3)
        # Statements are published: the folders of a path may name people and machines.
        assert found.source.endswith(f" {name}, declared public by the operator")
        assert found.is_public
        assert found.words[:2] == ("a", "b")


def _users(first, count):
    return {
        f"user{i}": [f"text {k} of user {i} says what nobody else ever says" for k in range(3)]
        for i in range(first, first + count)
    }


def _vocabulary_of(tmp_path, users, protected):
    path = tmp_path / "vocabulary.jsonl.gz"
    jsonl.write(user_text.UserText.from_mapping("v", users), path)
    corpus = user_text.UserText.from_mapping("m", protected)
    return vocabulary.from_file(path, 5, protected=corpus)


@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(lambda users: users, id="a copy"),
        pytest.param(lambda users: dict(reversed(users.items())), id="another order"),
        pytest.param(lambda users: {u: t[::-1] for u, t in users.items()}, id="texts turned round"),
        pytest.param(lambda users: {u: t[:1] for u, t in users.items()}, id="some of the texts"),
        pytest.param(lambda users: {f"x{u}": t for u, t in users.items()}, id="other ids"),
        pytest.param(
            lambda users: {u: [s.upper() for s in t] for u, t in users.items()}, id="case"
        ),
    ],
)
def test_words_of_protected_users_are_not_public(tmp_path, copied):
    protected = _users(0, 10)
    with pytest.raises(
        ValueError, match="cannot be public: it has the texts of 10 of the 10 users"
    ):
        _vocabulary_of(tmp_path, copied(protected), protected)
    one_of_them = copied(_users(9, 1)) | _users(100, 20)
    with pytest.raises(ValueError, match="texts of 1 of the 10 users of m.*'private'"):
        _vocabulary_of(tmp_path, one_of_them, protected)


def test_other_users_may_be_public(tmp_path):
    assert _vocabulary_of(tmp_path, _users(100, 10), _users(0, 10)).words
    # The same id, or the same few words, may be another's.
    protected = {"a": ["hello"], "b": ["what is this"], "c": [""]}
    assert _vocabulary_of(tmp_path, {"b": ["hello"], "a": ["bye"], "c": []}, protected).words


def test_a_tokenized_corpus_is_counted_as_it_is():
    corpus = user_text.UserText.from_mapping(
        "so", {"u": ["front-end <URL>"], "v": ["front-end"]}, is_tokenized=True
    )
    assert vocabulary.most_frequent(corpus, 5, source="test").words == ("front-end", "<url>")


def test_the_standard_library_makes_a_public_vocabulary(standard_library):
    found = vocabulary.standard_library(1000, cache_dir=standard_library)
    assert len(found.words) == 1000
    assert found.source == "docstrings of Python's standard library"
    assert {"the", "of", "return", "."} <= set(found.words[:30])


_REVIEWS = """Delicious pizza, crispy crust! The waiter was friendly, but we waited forty minutes.
I bought this phone for my daughter; the battery dies after three hours and the screen scratched.
Best coffee maker I've ever owned. Easy to clean, and it looks beautiful on my kitchen counter.
Don't waste your money. The zipper broke the second time I wore it, so I want a refund.
My wife loves these shoes: they fit perfectly and she gets compliments every day.
The hotel room smelled of smoke, the bathroom was dirty and breakfast was cold."""


def test_ordinary_english_knows_the_words_of_product_reviews(standard_library):
    found = vocabulary.english(4000)
    assert len(found.words) == 4000 and found.is_public
    assert {"the", "of", "food", "phone", "don't", ".", "#", "7"} <= set(found.words)
    words = tokenizer.Tokenizer().words(_REVIEWS)
    unknown = [
        np.mean([word not in names.words for word in words])
        for names in (
            found,
            vocabulary.standard_library(4000, cache_dir=standard_library),
            vocabulary.english(20_000),
        )
    ]
    assert unknown[0] < 0.5 * unknown[1] and unknown[2] < 0.02


def test_the_list_of_english_names_its_licence_and_has_words_of_one_token_each():
    found = vocabulary.english(10**6)
    assert len(found.words) == 20_000
    rule = tokenizer.Tokenizer()
    assert not [word for word in found.words if rule.words(word) != [word]]
    head = vocabulary._ENGLISH_FILE.read_text("utf-8").partition("\n.\n")[0]
    for text in (head, found.source):
        assert "wordfreq 3.1.1" in text
    assert "Attribution-ShareAlike 4.0" in head and "CC BY-SA 4.0" in found.source
    with pytest.raises(ValueError, match="lower_case must be true with the vocabulary 'english'"):
        vocabulary.english(10, lower_case=False)
    with pytest.raises(ValueError, match="size of the vocabulary must be at least 1"):
        vocabulary.english(0)


def test_words_are_counted_without_padding_and_the_ends_of_texts():
    found = vocabulary.Vocabulary(("a", "b"), "test")
    ids = np.array([[found.bos, 1, found.oov, found.eos, vocabulary.PAD], [2, 2, 1, found.oov, 1]])
    assert found.count(ids) == (7, 2)


def test_word_lists(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("The 120\nof 90\n\nthe 3\nüber\n", encoding="utf-8")
    found = vocabulary.from_file(path)
    assert found.words == ("the", "of", "über")
    assert path.name in found.source
    assert vocabulary.from_file(path, 2).words == ("the", "of")
    assert vocabulary.from_file(path, lower_case=False).words == ("The", "of", "the", "über")

    # With a byte order mark, and decomposed letters.
    path.write_text("the\ncafe\u0301\n", encoding="utf-8-sig")
    assert vocabulary.from_file(path).words == ("the", "caf\xe9")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"\n \n", "has no words"), (b"caf\xe9\n", "cannot be read")],
)
def test_bad_word_lists_are_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"bad.txt: the vocabulary {message}"):
        vocabulary.from_file(tmp_path / "bad.txt")


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_must_be_positive(tmp_path, size):
    with pytest.raises(ValueError, match="size of the vocabulary must be at least 1"):
        vocabulary.most_frequent(_corpus(), size, source="test")
    with pytest.raises(ValueError, match="size of the vocabulary must be at least 1"):
        vocabulary.from_file(tmp_path / "words.txt", size)


def test_words_must_be_there_and_distinct():
    with pytest.raises(ValueError, match="must not be empty"):
        vocabulary.Vocabulary((), "nowhere")
    with pytest.raises(ValueError, match="must be distinct"):
        vocabulary.Vocabulary(("a", "a"), "twice")


def test_a_copy_with_users_put_together_is_no_public_text():
    texts = {f"user{i}": [f"word{i} " * 12, f"more{i} " * 12] for i in range(4)}
    protected = user_text.UserText.from_mapping("protected", texts)
    merged = {f"other{i}": texts[f"user{2 * i}"] + texts[f"user{2 * i + 1}"] for i in range(2)}
    copy = user_text.UserText.from_mapping("copy", merged)
    assert user_text.shared_users(copy, protected) == 4


def _write_counts(path, rows, header="histogram,bucket,estimate,standard_error,share"):
    path.mkdir(exist_ok=True)
    (path / "counts.csv").write_text("\n".join([header, *rows]) + "\n")
    return path / "counts.csv"


def test_words_are_chosen_by_counts_with_noise(tmp_path):
    rows = ["words,a,9.0,10,", "words,b,21,10,", "words,c,-30,10,", 'words,"d,e",90,10,']
    rows += ["words,(other words),500,10,", "lengths,0,700,10,"]
    path = _write_counts(tmp_path, rows)
    assert vocabulary.is_of_counts(path)
    found = vocabulary.from_counts(path, 3)
    # Noise alone would put a before c: these keep the order of the list.
    assert found.words == ("d,e", "b", "a")
    assert vocabulary.from_counts(path, 9).words == ("d,e", "b", "a", "c")
    assert found.is_noised and not found.is_public
    assert str(tmp_path) not in found.source and "counts with noise" in found.source


def test_a_table_of_users_may_be_called_counts(tmp_path):
    path = _write_counts(tmp_path, ["u,a b"], header="user,text")
    assert not vocabulary.is_of_counts(path)
    assert not vocabulary.is_of_counts(tmp_path / "none" / "counts.csv")
    assert not vocabulary.is_of_counts(_write_counts(tmp_path, []).rename(tmp_path / "c.csv"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["lengths,0,700,10,"], "counts.csv has no counts of words"),
        (["words,a,much,10,"], "counts.csv: the counts cannot be read: .*much"),
        (["words,a"], "counts.csv: the counts cannot be read"),
        (["words,The,5,1,"], "lower_case must be false with .*counts.csv"),
    ],
)
def test_counts_that_cannot_be_used_are_refused(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        vocabulary.from_counts(_write_counts(tmp_path, rows), 3)
