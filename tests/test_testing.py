"""The public test helpers: what they call the same, what they do not, and how they say it."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_det.testing import assert_same_bits, check_reproducible, fingerprint

NAN = np.uint32(0x7FC00000).view(np.float32)
OTHER_NAN = np.uint32(0x7FC00001).view(np.float32)

SAME = [
    (np.float32(1), jnp.float32(1)),
    (1.5, 1.5),
    (NAN, NAN),
    ({"a": [1, (2.0, None)]}, {"a": [1, (2.0, None)]}),
    (np.zeros((2, 0)), np.zeros((2, 0))),
    (np.arange(6).reshape(2, 3).T, np.ascontiguousarray(np.arange(6).reshape(2, 3).T)),
    (np.arange(3, dtype=">f4"), np.arange(3, dtype="<f4")),
    (jnp.arange(3, dtype=jnp.bfloat16), np.arange(3).astype(jnp.bfloat16)),
    (jax.random.key(3), jax.random.key(3)),
    (np.array([1 + 2j]), np.array([1 + 2j])),
    ([], []),
]

DIFFERENT = [
    ("dtype", np.float32(1), np.float64(1)),
    ("dtype", 1, 1.0),
    ("dtype", True, 1),
    ("dtype", jnp.bfloat16(1), np.float16(1)),
    ("shape", np.zeros((2, 3)), np.zeros((3, 2))),
    ("shape", np.zeros(1), np.float64(0)),
    ("structure", (1, 2), [1, 2]),
    ("structure", {"a": 1}, {"b": 1}),
    ("structure", [1], [1, 2]),
    ("structure", [1, None], [1]),
    ("0 ulp", 0.0, -0.0),
    ("NaN", NAN, OTHER_NAN),
    ("NaN", NAN, np.float32(1)),
    ("1 ulp", np.float32(1), np.nextafter(np.float32(1), np.float32(2))),
    ("2 ulp", np.float32(-1e-45), np.float32(1e-45)),
    ("8 ulp", jnp.float32(1), jnp.float32(1 + 8 * 2.0**-23)),
    ("128 ulp", jnp.bfloat16(1), jnp.bfloat16(2)),
    ("3 apart", np.int32(-1), np.int32(2)),
    ("differ", np.array([True]), np.array([False])),
    ("differ", jax.random.key(0), jax.random.key(1)),
    ("ulp", np.array([1 + 2j]), np.array([1 + 3j])),
    ("apart", jnp.array([1, 2], jnp.int4), jnp.array([1, 3], jnp.int4)),
]


@pytest.mark.parametrize(("got", "want"), SAME)
def test_same_bits(got, want):
    assert_same_bits(got, want)
    assert fingerprint(got) == fingerprint(want)


@pytest.mark.parametrize(("words", "got", "want"), DIFFERENT)
def test_different_bits(words, got, want):
    with pytest.raises(AssertionError, match=words):
        assert_same_bits(got, want)
    with pytest.raises(AssertionError, match=words):
        assert_same_bits(want, got)


@pytest.mark.parametrize(
    ("words", "got", "want"), [case for case in DIFFERENT if case[0] != "structure"]
)
def test_fingerprint_differs(words, got, want):
    del words
    assert fingerprint(got) != fingerprint(want)


def test_fingerprint_is_fixed():
    """The same on every machine and in every version: these digits are part of the contract."""
    tree = {"b": np.arange(6, dtype=np.int32).reshape(2, 3), "a": jnp.float32(0.1)}
    want = "33d26571b4bb0a20a1f09845ea5c876dc4a02127f865eef2159aaacf09f39e4e"
    assert fingerprint(tree) == want
    assert fingerprint([tree["a"], tree["b"]]) == want  # leaves in tree order
    assert fingerprint([tree["b"], tree["a"]]) != want
    assert re.fullmatch("[0-9a-f]{64}", fingerprint([]))


def test_fingerprint_keeps_leaves_apart():
    a = np.zeros(4, np.uint8)
    assert fingerprint([a, a]) != fingerprint([np.zeros(8, np.uint8)])
    assert fingerprint([a, a[:0]]) != fingerprint([a[:0], a])
    assert fingerprint([a]) != fingerprint([a, a[:0]])


def test_message_names_the_leaf_the_index_and_the_values():
    Point = collections.namedtuple("Point", "x y")
    want = {"grads": Point(np.zeros(2, np.float32), np.ones((2, 3), np.float32))}
    y = np.ones((2, 3), np.float32)
    y[1, 0] += 2.0**-22
    y[1, 2] = 7
    with pytest.raises(AssertionError) as error:
        assert_same_bits({"grads": Point(np.zeros(2, np.float32), y)}, want)
    message = str(error.value)
    assert "['grads'].y" in message
    assert "(1, 0)" in message
    assert "0x3f800002" in message
    assert "0x3f800000" in message
    assert "2 ulp" in message
    assert "2 of 6" in message


@pytest.mark.parametrize("leaf", ["text", object(), np.array(["text"]), np.array([None])])
def test_leaves_without_bits_are_refused(leaf):
    for call in (fingerprint, lambda x: assert_same_bits(x, x)):
        with pytest.raises(TypeError, match=r"leaf \['a'\].*allowed"):
            call({"a": leaf})


def test_check_reproducible_calls_as_given():
    calls = []

    def f(x, scale):
        calls.append(type(x))
        return {"y": x * scale}

    out = check_reproducible(f, np.float32(2), repeats=5, kwargs={"scale": np.float32(3)})
    assert calls == [np.float32] * 5
    assert_same_bits(out, {"y": np.asarray(6, np.float32)})


def test_check_reproducible_finds_a_late_difference():
    count = iter(range(100))

    def f(x):
        return {"same": x, "late": x + np.float32(2.0**-23) * (next(count) == 3)}

    with pytest.raises(AssertionError) as error:
        check_reproducible(f, np.ones(3, np.float32), repeats=4)
    message = str(error.value)
    assert "call 4 of 4" in message
    assert "['late']" in message
    assert "1 ulp" in message


def test_check_reproducible_sees_changes_in_a_reused_buffer():
    buffer = np.zeros(2)

    def f():
        buffer[0] += 1
        return buffer

    with pytest.raises(AssertionError, match="call 2 of 2"):
        check_reproducible(f, repeats=2)


def test_check_reproducible_jit():
    def f(x):
        return x + (0 if isinstance(x, jax.core.Tracer) else 1)

    x = jnp.float32(1)
    check_reproducible(f, x, repeats=2)
    with pytest.raises(AssertionError, match="jitted call 1 of 2"):
        check_reproducible(f, x, repeats=2, jit=True)
    check_reproducible(lambda x: x + 1, x, repeats=2, jit=True)


def test_check_reproducible_keys_and_structure():
    check_reproducible(jax.random.key, 3, repeats=3)
    sizes = iter([1, 2])
    with pytest.raises(AssertionError, match="structure"):
        check_reproducible(lambda: [0] * next(sizes), repeats=2)
    with pytest.raises(ValueError, match="repeats: got 0"):
        check_reproducible(lambda: 0, repeats=0)
