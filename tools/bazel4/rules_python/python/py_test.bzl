"""Stand-in: Bazel 4 has this rule built in."""

py_test = native.py_test
