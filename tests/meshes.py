"""Meshes of CPU devices, and what a compiled program sends between them."""

from __future__ import annotations

import math
import re

import jax
from jax.sharding import AxisType, NamedSharding

AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]


def make_mesh(shape, names, axis_type=AxisType.Auto):
    devices = jax.devices("cpu")[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names), devices=devices)


def put(mesh, *arrays_and_specs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in arrays_and_specs]


def collectives(run, *operands):
    """Result types and names of the collectives in the compiled program."""
    text = run.lower(*operands).compile().as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return re.findall(rf"= \(?(\w+)\[.*? ({kinds})(?:-start)?\(", text)


def assert_adds_no_floats(run, *operands):
    """No collective of the program adds floating-point numbers."""
    floats = [kind for dtype, kind in collectives(run, *operands) if dtype[0] in "fb"]
    assert not {"all-reduce", "reduce-scatter"} & {*floats}, floats
