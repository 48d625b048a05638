"""Tests of tff_dpftrl.data.split."""

import collections
import hashlib
import pathlib

import pytest

from tff_dpftrl.data import jsonl, split, user_text

_SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"


def _corpus(count):
    return user_text.UserText.from_mapping("m", {f"user {i}": [str(i)] for i in range(count)})


def test_buckets_are_those_of_the_documented_formula():
    for user_id in ("a", "HAMLET", "ü"):
        expected = int(hashlib.sha256(user_id.encode()).hexdigest(), 16) % 10
        assert split.hash_bucket(user_id) == expected
    # sha256("abc") = ba7816bf...15ad, from FIPS 180-2, appendix B.1.
    digest = 0xBA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD
    assert split.hash_bucket("abc") == digest % 10


def test_parts_are_disjoint_and_complete():
    corpus = _corpus(1000)
    parts = split.by_user(corpus)
    users = [*parts.train.user_ids, *parts.validation.user_ids, *parts.test.user_ids]
    assert sorted(users) == sorted(corpus.user_ids)
    assert all(split.hash_bucket(user) == 0 for user in parts.test.user_ids)
    assert all(split.hash_bucket(user) == 1 for user in parts.validation.user_ids)
    assert list(parts.train.user_ids) == [u for u in corpus.user_ids if split.hash_bucket(u) > 1]


def test_buckets_are_even():
    counts = collections.Counter(split.hash_bucket(str(i)) for i in range(10_000))
    # Six standard errors of a binomial count with n = 10,000 and p = 0.1: 6 · 30.
    assert all(abs(counts[bucket] - 1000) < 180 for bucket in range(10))


def test_shakespeare_splits_as_documented():
    path = _SHARED / "shakespeare_by_role.jsonl.gz"
    if not path.exists():
        pytest.skip("../shared/data is not there")
    parts = split.by_user(jsonl.read(path))
    # ../shared/data/README.md, "Suggested split".
    assert [len(parts.train), len(parts.validation), len(parts.test)] == [895, 112, 112]
    examples = [
        sum(1 for _ in part.texts()) for part in (parts.train, parts.validation, parts.test)
    ]
    assert examples == [24_809, 2_991, 2_894]
