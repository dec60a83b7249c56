"""Stand-in: Bazel 4 has this rule built in."""

cc_test = native.cc_test
