"""Tests of tff_dpftrl.training.task."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from tests.training import sqlite_file
from tff_dpftrl.models import ngrams, text_cache
from tff_dpftrl.training import config as config_lib
from tff_dpftrl.training import corpus, task

_TEXTS = ('The front-end isn\'t 3.5 times "faster".', "Why? Because the tests say so!")


def _users(count=40):
    return {f"user{i}": [_TEXTS[i % 2], f"word{i} the"] for i in range(count)}


def _write_jsonl(path, users):
    rows = (json.dumps({"user_id": user, "examples": texts}) for user, texts in users.items())
    path.write_text("\n".join(rows) + "\n")
    return path


def _build(data, **options):
    vocabulary = data.with_name("words.txt")
    vocabulary.write_text("the\nfront\nend\nbecause\ntests\nisn't\n.\n-\n")
    defaults = {"data": str(data), "vocabulary": str(vocabulary), "mechanism": "none"}
    config = config_lib.TrainingConfig.of(**defaults | options)
    text = corpus.read(config.part(corpus.TextOptions))
    return task.build_language_task(config.part(task.TaskOptions), text)


def test_the_same_corpus_is_the_same_in_sqlite_and_in_json_lines(tmp_path):
    lines = _build(_write_jsonl(tmp_path / "c.jsonl", _users()))
    rows = _build(sqlite_file.write(tmp_path / "c.sqlite", _users()))
    assert rows.training_text == lines.training_text
    assert sorted(rows.train.user_ids) == sorted(lines.train.user_ids)
    for user in lines.train.user_ids:
        np.testing.assert_array_equal(rows.train.sequences(user), lines.train.sequences(user))


@pytest.mark.parametrize(
    ("write", "name"), [(_write_jsonl, "c.jsonl"), (sqlite_file.write, "c.sqlite")]
)
def test_text_can_be_taken_as_words_already(tmp_path, write, name):
    data = write(tmp_path / name, _users())
    split = _build(data).training_text
    as_it_is = _build(data, pretokenized=True).training_text
    # The texts have 11 and 8 words, and six parts between spaces each.
    assert as_it_is.num_words < split.num_words
    assert as_it_is.oov_share > split.oov_share


def test_sqlite_options_reach_the_reader(tmp_path):
    data = sqlite_file.write(tmp_path / "c.sqlite", _users(), feature="body")
    assert _build(data, sqlite_text_feature="body", sqlite_split="train").training_text.num_words
    with pytest.raises(ValueError, match="with one value of bytes are body"):
        _build(data)
    with pytest.raises(ValueError, match="no clients in the split 'test'; its splits are train"):
        _build(data, sqlite_split="test")


def test_the_training_text_is_counted(tmp_path):
    users = _users() | {f"silent{i}": [" "] for i in range(10)}
    built = _build(_write_jsonl(tmp_path / "c.jsonl", users), max_users=None)
    words = {"the", "front", "end", "because", "tests", "isn't", ".", "-"}
    by_text = {
        _TEXTS[0]: 'the front - end isn\'t 3.5 times " faster " .'.split(),
        _TEXTS[1]: "why ? because the tests say so !".split(),
    }
    texts = [t for user in built.train.user_ids for t in users[user] if t.strip()]
    tokens = [w for text in texts for w in by_text.get(text, text.split())]
    # "word7" is two words, "word" and "7".
    tokens += ["7" for text in texts if text.startswith("word")]
    facts = built.training_text
    assert facts.num_users == len(built.train.user_ids)
    assert facts.num_users_without_text == sum(u.startswith("silent") for u in built.train.user_ids)
    assert 0 < facts.num_users_without_text < 10
    assert facts.num_sequences == len(texts)
    assert facts.num_words == len(tokens)
    assert facts.oov_share == sum(token not in words for token in tokens) / len(tokens)
    assert built.num_held_out_users > 0
    assert len(built.held_out) <= 2 * built.num_held_out_users


def test_all_seeds_are_judged_by_the_same_sequences(tmp_path):
    path = _write_jsonl(tmp_path / "c.jsonl", _users(200))
    first, second = (_build(path, eval_sequences=5, seed=seed) for seed in (0, 1))
    assert len(first.held_out) == 5
    np.testing.assert_array_equal(first.held_out, second.held_out)


def test_what_is_released_of_a_held_out_user_depends_on_its_own_text_alone(tmp_path):
    users = _users(100)
    small = {"embedding_size": 4, "lstm_size": 5, "sequence_length": 6}
    built = _build(_write_jsonl(tmp_path / "c.jsonl", users), **small)
    weights = built.model.initial_weights(0)
    names = ["loss_sum", "num_targets", "num_top1", "num_in_vocab"]
    everybody = built.counts_of_users(10_000)(weights, names)
    assert everybody.shape == (built.num_held_out_users, 4)
    # No user has more sequences than are measured: all are, as the exact evaluation does.
    exact = built.evaluate(weights)
    assert everybody[:, 0].sum() / everybody[:, 1].sum() == pytest.approx(exact["loss"], rel=1e-5)
    some = built.counts_of_users(40)(weights, names)
    assert 0 < len(some) < len(everybody)
    assert built.counts_of_users(0)(weights, names).shape == (0, 4)
    gone, kept = built.held_out_text.user_ids[3], built.held_out_text.user_ids
    fewer = {user: text for user, text in users.items() if user != gone}
    other = _build(_write_jsonl(tmp_path / "d.jsonl", fewer), **small)
    rest = other.counts_of_users(10_000)(weights, names)
    left = [row for user, row in zip(kept, everybody, strict=True) if user != gone]
    np.testing.assert_allclose(rest, left, rtol=1e-5)
    held_out = len(built.held_out_text.user_ids)
    # Whoever splits by other means may have looked at the texts.
    for swapped, wrong in (
        ({"held_out_text": built.train}, len(built.train.user_ids)),
        ({"train": built.held_out_text}, held_out),
    ):
        with pytest.raises(ValueError, match=f"^{wrong} users .* the hash of their ids says other"):
            dataclasses.replace(built, **swapped).counts_of_users(10)


def test_held_out_users_are_examined_one_by_one(tmp_path):
    built = _build(_write_jsonl(tmp_path / "c.jsonl", _users()), embedding_size=4, lstm_size=5)
    weights = built.model.initial_weights(0)
    best = list(built.model.weight_shapes).index("output_bias")
    weights[best][1] = 9.0  # "the", always.
    found = built.examine(weights)
    assert json.loads(json.dumps(found)) == found
    users = [built.held_out[built.held_out_users == i, 1:] for i in np.unique(built.held_out_users)]
    words = [rows[(rows > 0) & (rows <= built.words.oov)] for rows in users]
    assert (found["users"], found["words"]) == (len(users), sum(map(len, words)))
    assert found["sequences"] == len(built.held_out) and len(users) > 1
    in_vocab = [own[own < built.words.oov] for own in words]
    for name, counted in (("top1_in_vocab", in_vocab), ("top1_oov_wrong", words)):
        accuracies = [np.mean(own == 1) for own in counted if len(own)]
        assert found["accuracy_by_user"][name]["users"] == len(accuracies)
        quantiles = found["accuracy_by_user"][name]["quantiles"]
        assert quantiles == pytest.approx(
            {str(q): np.quantile(accuracies, q) for q in map(float, quantiles)}
        )
        assert list(quantiles) == ["0.05", "0.25", "0.5", "0.75", "0.95"]
    assert found["earlier_text"] == _with_earlier_text(built)
    # The vocabulary has eight words, all of which are proposed, and are among the first ten.
    assert found["head_words"]["top"] == 8
    assert found["head_words"]["histograms"]["10"] == [0.0] * 8 + [1.0]


def test_ngrams_are_judged_as_the_model_is_in_one_pass(tmp_path, monkeypatch):
    built = _build(_write_jsonl(tmp_path / "c.jsonl", _users()), embedding_size=4, lstm_size=5)
    compute, passes = ngrams.NgramModel.probabilities, []

    def noticed(model, sequences, positions):
        passes.append(sequences)
        return compute(model, sequences, positions)

    monkeypatch.setattr(ngrams.NgramModel, "probabilities", noticed)
    accuracies = built.baselines()
    np.testing.assert_array_equal(np.concatenate(passes), built.held_out)
    names = ["unigrams", "bigrams", "trigrams", "4-grams"]
    cached = [f"{name} with earlier text" for name in ("trigrams", "4-grams")]
    assert list(accuracies) == names + cached
    for name, order in zip(cached, (3, 4), strict=True):
        assert accuracies[name] == pytest.approx(_ngrams_with_earlier_text(built, order))


def _ngrams_with_earlier_text(built, order):
    """Top-1 accuracy of n-grams with a cache, counted one word at a time."""
    special, size = built.special, built.words.size
    model = ngrams.NgramModel(built.train.pooled(), special, size, max_order=4)
    words = np.flatnonzero(~np.isin(built.held_out[:, 1:], special.all))
    shares = list(model.probabilities(built.held_out, words))[order - 1]
    right = 0
    for place, base in zip(words, shares, strict=True):
        row, position = divmod(int(place), built.held_out.shape[1] - 1)
        texts = built.held_out_text.sequences(
            built.held_out_text.user_ids[built.held_out_users[row]]
        )
        begun = built.held_out[row].tolist()[: position + 1]
        history = texts[: built.held_out_places[row]].tolist()
        mixed = _mixed_by_hand(base, begun, history, built.words)[: built.words.oov]
        own = mixed[built.held_out[row, position + 1]]
        right += (mixed >= own - 1e-7).sum() == 1  # A tie is no guess.
    return right / len(words)


def _with_earlier_text(built):
    """What `examine` says of a model that always says word 1, counted one word at a time."""
    parts = {name: {"words": 0, "model": 0, "model_and_cache": 0} for name in ("with", "without")}
    for row, user, place in zip(
        built.held_out, built.held_out_users, built.held_out_places, strict=True
    ):
        texts = built.held_out_text.sequences(built.held_out_text.user_ids[user])
        np.testing.assert_array_equal(texts[place], row)
        part = parts["with" if place else "without"]
        history = texts[:place].tolist()
        for position, word in enumerate(row.tolist()[1:]):
            if not 1 <= word < built.words.oov:
                continue
            base = np.zeros(built.words.size)
            base[1] = 1.0
            mixed = _mixed_by_hand(base, row.tolist()[: position + 1], history, built.words)
            mixed[built.words.oov :] = -1.0
            part["words"] += 1
            part["model"] += word == 1
            part["model_and_cache"] += word == mixed.argmax()
    parts = {"all": {k: sum(p[k] for p in parts.values()) for k in parts["with"]}} | parts
    assert parts["with"]["words"] and parts["without"]["words"]
    return {
        name: {k: v if k == "words" else pytest.approx(v / part["words"]) for k, v in part.items()}
        for name, part in parts.items()
    }


def _mixed_by_hand(base, begun, history, words):
    cached, longest = np.zeros(len(base)), 0
    for order in range(1, 5):
        context = [0, 0, *begun][len(begun) + 3 - order :]
        found = [
            row[t]
            for row in history
            for t in range(1, len(row))
            if row[t] not in (0, words.bos) and ([0, 0, *row[:t]])[t + 3 - order : t + 2] == context
        ]
        if found:
            counts = np.bincount(found, minlength=len(base))
            lower = (counts > 0).sum() * (order > 1)
            cached, longest = (counts + lower * cached) / (len(found) + lower), order
    weight = (0.0, *text_cache.WEIGHTS)[longest]
    return (1 - weight) * base + weight * cached


def test_protected_text_in_sqlite_is_no_public_vocabulary(tmp_path):
    vocabulary = _write_jsonl(tmp_path / "c.jsonl", _users())
    data = sqlite_file.write(tmp_path / "c.sqlite", _users())
    for path in (vocabulary, data):
        with pytest.raises(ValueError, match="cannot be public"):
            _build(data, vocabulary=str(path))
