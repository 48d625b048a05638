"""Runs the tests of the files that the arguments name: all of a folder, for Bazel."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
