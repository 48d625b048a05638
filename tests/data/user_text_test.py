"""Tests of tff_dpftrl.data.user_text."""

import pytest

from tff_dpftrl.data import user_text


def _corpus(**users):
    return user_text.UserText.from_mapping("fruit", users, user_unit="one basket")


def test_users_and_examples_keep_their_order():
    corpus = _corpus(b=["2", "1"], a=[], c=["3"])
    assert corpus.user_ids == ("b", "a", "c")
    assert len(corpus) == 3
    assert corpus.examples("b") == ["2", "1"]
    assert corpus.examples("a") == []
    assert list(corpus.texts()) == ["2", "1", "3"]
    assert corpus.user_unit == "one basket"


def test_a_table_becomes_a_corpus():
    rows = [("b", "2"), ["a", "1"], ("b", "1"), ("b", "2")]
    corpus = user_text.UserText.from_rows("t", iter(rows), user_unit="one x", is_tokenized=True)
    assert corpus.user_ids == ("b", "a")
    assert corpus.examples("b") == ["2", "1", "2"] and corpus.examples("a") == ["1"]
    assert (corpus.name, corpus.user_unit, corpus.is_tokenized) == ("t", "one x", True)
    assert len(user_text.UserText.from_rows("t", [])) == 0


def test_numbers_as_ids_are_one_user_each_or_refused():
    corpus = user_text.UserText.from_rows("t", [(7, "x"), (7.0, "y"), ("7", "z"), (8, "w")])
    assert corpus.user_ids == ("7", "8") and corpus.examples("7") == ["x", "y", "z"]
    with pytest.raises(ValueError, match="t: ids of users write one number in several ways"):
        user_text.UserText.from_mapping("t", {"7": ["x"], "7.0": ["y"]})
    with pytest.raises(ValueError, match="t: ids of users write one number in several ways"):
        user_text.UserText("t", "one x", ("7", "8"), list, co_owners={"7": {"8.0"}})
    with pytest.raises(ValueError, match="^'t', row 1: .* not exact"):
        user_text.UserText.from_rows("t", [("a", "x"), (2.0**53, "x")])
    for user in ("", " ", "a\0", "\ud800"):
        with pytest.raises(ValueError, match="fruit has an entry with"):
            _corpus(**{user: ["x"]})


@pytest.mark.parametrize(
    "row", [("a",), ("a", 1), (float("nan"), "text"), ("", "text"), ("a", None), "ab"]
)
def test_rows_that_are_no_user_and_text_are_refused(row):
    with pytest.raises(ValueError, match="row 1 of 't' is .*leave out rows"):
        user_text.UserText.from_rows("t", [("a", "text"), row])


def test_blank_texts_are_no_text():
    assert _corpus(a=[], b=["", " "], c=["x"]).has_text()
    assert not _corpus(a=[], b=["", " \n"]).has_text()


def test_a_caller_cannot_change_the_corpus():
    texts = ["x"]
    corpus = user_text.UserText.from_mapping("m", {"a": texts})
    texts.append("y")
    corpus.examples("a").append("z")
    assert corpus.examples("a") == ["x"]


def test_reading_is_lazy():
    read = []

    def read_examples(user_id):
        read.append(user_id)
        return [user_id]

    corpus = user_text.UserText("lazy", "one user", ("a", "b"), read_examples)
    assert not read
    assert corpus.select(["b"]).examples("b") == ["b"]
    assert read == ["b"]


def test_select_keeps_what_the_corpus_is():
    corpus = user_text.UserText.from_mapping(
        "t", {"a": ["1"], "b": ["2"]}, user_unit="one x", is_tokenized=True
    )
    part = corpus.select(["b"])
    assert (part.name, part.user_unit, part.is_tokenized) == ("t", "one x", True)
    assert part.user_ids == ("b",)
    assert corpus.select([]).user_ids == ()
    with pytest.raises(ValueError, match="'a' is not a user of 't'"):
        part.examples("a")
    with pytest.raises(ValueError, match="'q' is not"):
        corpus.select(["a", "q"])


def test_copies_are_recognised_without_spaces_between_words():
    sentence = "我们在学习语言模型的隐私保护方法"
    public = _corpus(x=[sentence * 3], y=[sentence])
    assert user_text.shared_users(public, _corpus(a=[sentence], b=["别的话" * 20])) == 0
    assert user_text.shared_users(public, _corpus(a=[sentence * 3], b=[sentence])) == 1


def test_repeated_users_are_refused():
    with pytest.raises(ValueError, match="1 of them are repeated"):
        user_text.UserText("d", "one user", ("a", "b", "a"), lambda user_id: [])
    with pytest.raises(ValueError, match="unique"):
        _corpus(a=[], b=[]).select(["a", "a"])


def test_a_corpus_needs_two_users():
    with pytest.raises(ValueError, match="fruit: the corpus is empty"):
        user_text.require_several_users(_corpus())
    with pytest.raises(ValueError, match="single user, 'a'"):
        user_text.require_several_users(_corpus(a=["1"]))
    corpus = _corpus(a=["1"], b=[])
    assert user_text.require_several_users(corpus) is corpus
