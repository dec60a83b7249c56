"""Stand-in: Bazel 4 has this rule built in."""

py_library = native.py_library
