"""Checks machine code and PTX of a CUDA module for what the promise about bits forbids.

Compiler flags say what should not happen; this looks at what came out: no approximate function, no
float32 multiply-add that the source does not ask for, no flush to zero, and no floating-point
atomic but those of the negative control.

Kernels with IEEE float32 division, square root and explicit multiply-adds are full of the seeds,
Newton steps and scalings that these are made of. There the machine code cannot tell; the PTX that
it was assembled from can, where each of them is one instruction that names its rounding. So PTX is
checked in every kernel: nothing approximate, nothing flushed to zero, and no addition or product
that the assembler may contract, which is one without a rounding. One approximate instruction is
approved, in those kernels: the seed of Reciprocal in ffi/core/exact_math.h, if nothing but the
Newton step that makes it exact reads it.

    python .ci/check_sass.py --architectures 80,90,100 _cuda.so

Needs cuobjdump and nvdisasm on the PATH.
"""

from __future__ import annotations

import argparse
import collections
import re
import subprocess
import sys
from collections.abc import Iterator

# Kernels whose source asks for float32 division, square root and fused multiply-adds.
IEEE_MATH = r"Router?[A-Z]|RoutingStats"  # TopkRouterFwdKernel, RouteFwdKernel
# What their machine code may have that others may not: the seeds of division and square root, and
# the flushing scalings and comparisons of both (a flushing multiply-add is of neither).
SEED = re.compile(r"MUFU\.(RCP|RSQ)$")
SCALING = re.compile(r"(FADD|FMUL|FSETP)\.")
# The negative control adds with atomics, and only it: finding them there proves that they would
# be found elsewhere.
NEGATIVE_CONTROL = r"AtomicKernel"

ARCHITECTURE = re.compile(r"^\s*code for sm_(\w+)")
FUNCTION = re.compile(r"^\s*Function : (\S+)")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
FLOAT_ATOMIC = re.compile(r"(RED|REDG|ATOM|ATOMG|ATOMS)\..*(F16|F32|F64|BF16)")
# Converts to an integer, in integer division: its operand is never subnormal.
FLUSH_TO_ZERO = re.compile(r"(?!F2I).*\.FTZ")

PTX_ARCHITECTURE = re.compile(r"^\.target sm_(\w+)")
PTX_FUNCTION = re.compile(r"\.(?:entry|func)\s+(?:\(.*?\)\s*)?(\w+)")
PTX_STATEMENT = re.compile(r"[\s{]*(?:@!?%p\d+\s+)?([a-z]\w*(?:\.\w+)+)\s+(.*)")
PTX_OPERAND = re.compile(r"%?\w+")  # registers of addresses and vectors too
PTX_FAULTS = {
    "approximate function": re.compile(r"[\w.]+\.(approx|full)\b"),
    "flush to zero": re.compile(r"[\w.]+\.ftz\b"),
    "addition or product without a rounding": re.compile(r"(add|sub|mul|mad|fma)(\.sat)?\.b?f\d"),
}
PTX_SEED = "rcp.approx.ftz.f32"
PTX_MINUS_ONE = "0fBF800000"


def instructions(module: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yields (architecture, function, opcode, operands) of every instruction of the module."""
    command = ["cuobjdump", "-sass", module]
    architecture = function = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if match := INSTRUCTION.match(line):
                yield architecture, function, match[1], [x.strip() for x in match[2].split(",")]
            elif match := FUNCTION.match(line):
                function = match[1]
            elif match := ARCHITECTURE.match(line):
                architecture = match[1]
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)


def ptx_instructions(module: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yields (architecture, function, opcode, operands) of each instruction of the module's PTX."""
    command = ["cuobjdump", "-ptx", module]
    architecture = function = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            for statement in line.split(";"):  # inline assembly may have several in a line
                if match := PTX_STATEMENT.match(statement):
                    yield architecture, function, match[1], PTX_OPERAND.findall(match[2])
            if match := PTX_FUNCTION.search(line):
                function = match[1]
            elif match := PTX_ARCHITECTURE.match(line):
                architecture = match[1]
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)


def bare_seeds(code: list[tuple[str, list[str]]]) -> int:
    """Counts the seeds of a function that something else than their Newton step reads.

    The step is t = fma(x, seed, -1), then fma(seed, -t, seed).
    """
    writers = collections.defaultdict(list)
    readers = collections.defaultdict(list)
    for instruction in code:
        operands = instruction[1]
        for written in operands[:1]:
            writers[written].append(instruction)
        for read in set(operands[1:]):
            readers[read].append(instruction)

    def is_minus_one(operand: str) -> bool:
        if operand not in writers:
            return operand == PTX_MINUS_ONE
        return all(move == ("mov.f32", [operand, PTX_MINUS_ONE]) for move in writers[operand])

    def is_step(seed: str, x: str) -> bool:
        if len(writers[seed]) != 1 or len(readers[seed]) != 2:
            return False
        (error_op, error), (result_op, result) = readers[seed]
        return (
            error_op == result_op == "fma.rn.f32"
            and sorted(error[1:3]) == sorted([x, seed])
            and is_minus_one(error[3])
            and result[1] == result[3] == seed
            and writers[result[2]] == [("neg.f32", [result[2], error[0]])]
            and len(readers[error[0]]) == len(readers[result[2]]) == 1
        )

    return sum(opcode == PTX_SEED and not is_step(*operands) for opcode, operands in code)


def is_approximation(opcode: str, operands: list[str], writers: dict[str, str]) -> bool:
    """Does the multi-function unit reach a value here?"""
    if not opcode.startswith("MUFU") or opcode == "MUFU.RCP64H":  # the seed of float64 division
        return False
    # A reciprocal of an integer starts an integer division, which corrects it.
    return not (opcode == "MUFU.RCP" and writers.get(operands[1], "").startswith("I2F"))


def is_multiply_add(opcode: str, operands: list[str]) -> bool:
    """Is this a fused multiply-add of float32 or float16 that multiplies anything?

    Compilers load constants with HFMA2 R0, -RZ, RZ, 0, 0 and add in float64 division with
    FFMA R0, RZ, R1, R2.
    """
    return opcode.startswith(("FFMA", "HFMA2")) and operands[1].lstrip("-") != "RZ"


def fault(function: str, opcode: str, operands: list[str], writers: dict[str, str]) -> str | None:
    """Says what is wrong with an instruction, or None; `writers`: who last wrote a register."""
    control = re.search(NEGATIVE_CONTROL, function)
    ieee_math = re.search(IEEE_MATH, function)
    if is_approximation(opcode, operands, writers) and not (ieee_math and SEED.match(opcode)):
        return "approximate function"
    if is_multiply_add(opcode, operands) and not (ieee_math and opcode.startswith("FFMA")):
        return "multiply-add"
    if FLOAT_ATOMIC.match(opcode):
        return None if control else "floating-point atomic"
    if FLUSH_TO_ZERO.match(opcode) and not (ieee_math and SCALING.match(opcode)):
        return "flush to zero"
    return None


def main() -> int:
    """Prints a summary and every fault; the exit status is 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module", help="shared library or fat binary, with PTX")
    parser.add_argument("--architectures", default="", help="that must be there: 80,90,100")
    arguments = parser.parse_args()

    # Of each architecture's functions: opcode that last wrote a register, in the code's order.
    writers: dict[str, dict[str, dict[str, str]]] = collections.defaultdict(dict)
    faults: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
    controls = set()
    for architecture, function, opcode, operands in instructions(arguments.module):
        written = writers[architecture].setdefault(function, {})
        if what := fault(function, opcode, operands, written):
            faults[architecture, function, opcode, what] += 1
        if FLOAT_ATOMIC.match(opcode) and re.search(NEGATIVE_CONTROL, function):
            controls.add(architecture)
        written[operands[0]] = opcode

    # Of each architecture's functions: the PTX.
    ptx: dict[str, dict[str, list[tuple[str, list[str]]]]] = collections.defaultdict(dict)
    for architecture, function, opcode, operands in ptx_instructions(arguments.module):
        ptx[architecture].setdefault(function, []).append((opcode, operands))
        if opcode == PTX_SEED and re.search(IEEE_MATH, function):
            continue
        for what, pattern in PTX_FAULTS.items():
            if pattern.match(opcode):
                faults[architecture, function, opcode, what] += 1
    for architecture, functions in ptx.items():
        for function, code in functions.items():
            if count := bare_seeds(code):
                faults[architecture, function, PTX_SEED, "seed without its Newton step"] = count

    missing = set(filter(None, arguments.architectures.split(","))) - set(writers)
    # The PTX says nothing about kernels that were not assembled from it.
    without_ptx = [
        f"sm_{architecture}: {function}"
        for architecture, functions in sorted(writers.items())
        for function in sorted(set(functions) - set(ptx[architecture]))
    ]
    blind = set(writers) - controls
    for architecture, functions in sorted(writers.items()):
        print(f"sm_{architecture}: {len(functions)} kernels")
    for (architecture, function, opcode, what), count in sorted(faults.items()):
        print(f"sm_{architecture}: {function}: {what}: {count} x {opcode}")
    if missing or not writers:
        print(f"no code for {', '.join(sorted(missing)) or 'any architecture'}")
    if blind:
        print(f"no atomic in the negative control, is it still there? {', '.join(sorted(blind))}")
    if without_ptx:
        print(f"no PTX of {len(without_ptx)} kernels, the first is {without_ptx[0]}")
    return 1 if faults or missing or blind or without_ptx or not writers else 0


if __name__ == "__main__":
    sys.exit(main())
