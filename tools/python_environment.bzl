"""Headers that pip installed: the FFI's in jaxlib, nanobind, and Python's own.

The Python environment that runs the tests is also the one that the module is built for: `python3`
of the PATH, or what `--repo_env=PYTHON=...` names.
"""

_FIND = """
import importlib.util, sysconfig
for package in ("jaxlib", "nanobind"):
    print(importlib.util.find_spec(package).submodule_search_locations[0])
print(sysconfig.get_path("include"))
"""

_BUILD = """
load("@rules_cc//cc:cc_library.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "ffi",
    hdrs = glob(["jaxlib/**/*.h"]),
    includes = ["jaxlib"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"] + glob(["nanobind/ext/robin_map/include/**/*.h"]),
    hdrs = glob(["nanobind/include/**/*.h", "python/**/*.h"]),
    copts = [
        "-std=c++17",
        "-fno-strict-aliasing",
        "-fvisibility=hidden",
        "-w",
    ],
    includes = [
        "nanobind/ext/robin_map/include",
        "nanobind/include",
        "python",
    ],
    textual_hdrs = glob([
        "nanobind/src/*.cpp",
        "nanobind/src/*.h",
    ]),
)
"""

def _python_environment_impl(repository_ctx):
    python = repository_ctx.os.environ.get("PYTHON") or repository_ctx.which("python3")
    if not python:
        fail("python_environment: no python3 on the PATH, and PYTHON is not set")
    found = repository_ctx.execute([python, "-c", _FIND])
    if found.return_code != 0:
        fail("python_environment: %s needs jaxlib and nanobind: %s" % (python, found.stderr))
    jaxlib, nanobind, include = found.stdout.splitlines()
    repository_ctx.symlink(jaxlib + "/include", "jaxlib")
    repository_ctx.symlink(nanobind, "nanobind")
    repository_ctx.symlink(include, "python")
    repository_ctx.file("BUILD.bazel", _BUILD)

python_environment = repository_rule(
    implementation = _python_environment_impl,
    environ = [
        "PATH",
        "PYTHON",
    ],
    local = True,
)
