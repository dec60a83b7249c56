"""Stand-in: Bazel 4 has this rule built in."""

cc_binary = native.cc_binary
