"""`python -m jax_moe_det`: fingerprints, exit status, JSON."""

import json
import re

import jax
import numpy as np
import pytest

from jax_moe_det import __main__ as cli


@pytest.mark.parametrize("name", cli.CASES)
def test_cli_table_comes_from_the_reference_order(name):
    assert cli.shipped_table()[name] == cli.CASES[name].reference_fingerprint()


def test_cli_table_has_no_other_entry():
    assert list(cli.shipped_table()) == list(cli.CASES)


def test_cli_passes(capsys):
    assert cli.main(["--backend", "cpu", "--repeats", "3"]) == 0
    out = capsys.readouterr().out
    assert "All bits are as promised." in out
    assert len(re.findall(r"^cpu +[a-z].* yes +1 ", out, re.MULTILINE)) == len(cli.CASES)


def test_cli_json(capsys):
    assert cli.main(["--backend", "cpu", "--repeats", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["backends"]["cpu"].startswith("present: ")
    for row in report["checks"]:
        assert row["fingerprint"] == row["expected"] == cli.shipped_table()[row["operation"]]
        assert row["distinct"] == 1
        assert row["us"] > 0
        assert row["plain_jax_us"] > 0


def test_cli_fails_on_a_mismatch(monkeypatch, capsys):
    wrong = {**cli.shipped_table(), "aux_loss masked": "0" * 64}
    monkeypatch.setattr(cli, "shipped_table", lambda: wrong)
    assert cli.main(["--backend", "cpu", "--repeats", "1"]) == 1
    out = capsys.readouterr().out
    assert "NO, want 0000000000000000" in out
    assert "FAILED" in out


@pytest.mark.parametrize("name", cli.CASES)
def test_cli_plain_jax_computes_the_same(name):
    """Times are of like with like."""
    case = cli.CASES[name]
    arguments = jax.device_put(case.arguments(), jax.devices("cpu")[0])
    got, want = jax.jit(case.plain)(*arguments), case.reference(*case.arguments())
    for x, y in zip(got, want, strict=True):
        # Plain JAX adds in an order of its own, and may round to 16 bits more than once.
        bound = 1e-4 if x.dtype == np.float32 else 1e-2
        x, y = (np.asarray(z).astype(np.float64) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=bound, atol=bound * np.abs(y).max())


def test_cli_loss_alone_has_an_atomic_kernel():
    for name, case in cli.CASES.items():
        assert (case.atomic is not None) == name.startswith("aux_loss")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="CUDA is present")
def test_cli_says_what_cuda_lacks(capsys):
    assert cli.main(["--backend", "cuda", "--repeats", "1"]) == 1
    assert re.search(r"cuda: asked for, but (not built: no CUDA compiler|built, not present: )",
                     capsys.readouterr().out)  # fmt: skip


@pytest.mark.gpu
def test_cli_gpu(capsys):
    assert cli.main(["--backend", "cuda", "--repeats", "20"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^cuda +[a-z].* yes +1 ", out, re.MULTILINE)) == len(cli.CASES)


def test_cli_refuses_no_repeats(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--repeats", "0"])
    assert exit_info.value.code == 2
    assert "--repeats: got 0; allowed: an integer >= 1" in capsys.readouterr().err
