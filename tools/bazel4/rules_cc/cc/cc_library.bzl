"""Stand-in: Bazel 4 has this rule built in."""

cc_library = native.cc_library
