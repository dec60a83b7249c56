"""Main program of the py_test rules: pytest on the files given, with this repository's settings."""

import os
import sys

import pytest

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if chosen := os.environ.get("TESTBRIDGE_TEST_ONLY"):  # bazel test --test_filter=...
        arguments += ["-k", chosen]
    sys.exit(pytest.main(arguments))
