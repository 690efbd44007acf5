"""What every file of the project keeps to, whoever wrote it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pdmux_ray.config import load_app_config

from .sources import ROOT, files, tree

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
ALLOWED_LARGER = frozenset(  # "path" or "path:function", with the reason beside it
    {
        # A Triton kernel takes numbers and addresses one by one, and hands them on so: a line each, here more than half of all.
        "pdmux_ray/device/cuda/kernels/decode_attention.py:_share_kernel",
        "pdmux_ray/device/cuda/kernels/prefill_attention.py:_block_kernel",
    }
)

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
REQUIREMENTS = sorted((ROOT / "deploy" / "requirements").glob("*.txt"))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_files_are_short() -> None:
    sizes = {
        str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines())
        for p in files("pdmux_ray", "kv_transfer", "tests")
    }
    assert {p: n for p, n in sizes.items() if n >= MAX_FILE_LINES and p not in ALLOWED_LARGER} == {}


def test_functions_are_short() -> None:
    sizes = {
        f"{p.relative_to(ROOT)}:{f.name}": (f.end_lineno or f.lineno) - f.lineno + 1
        for p in files("pdmux_ray", "kv_transfer", "tests")
        for f in functions(p)
    }
    assert {f: n for f, n in sizes.items() if n > MAX_FUNCTION_LINES and f not in ALLOWED_LARGER} == {}


def said(call: ast.Call) -> bool:
    return bool(call.args) and ast.unparse(call.func) in ("pytest.skip", "pytest.xfail")


def test_no_test_is_skipped_without_a_reason() -> None:
    silent = []
    for path in files("tests"):
        nodes = list(ast.walk(tree(path)))
        skips = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr in ("skip", "skipif", "xfail")]
        reasons = [n.func for n in nodes if isinstance(n, ast.Call) and (any(k.arg == "reason" for k in n.keywords) or said(n))]
        silent += [f"{path}:{n.lineno}" for n in skips if ast.unparse(n).startswith("pytest.") and n not in reasons]
    assert silent == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_config_is_valid_and_says_what_it_is_for(path: Path) -> None:
    load_app_config(path)
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert [a["import_path"] for a in document["applications"]] == ["pdmux_ray.serve.app:build_app"]
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_every_requirement_is_pinned() -> None:
    lines = [line for path in REQUIREMENTS for line in path.read_text().splitlines() if not line.startswith("#")]
    assert lines != []
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+==[A-Za-z0-9.]+", line)] == []


MACHINES = (("cpu", "dev-cpu"), ("gpu",))  # what only machines without and with a GPU have


@pytest.mark.parametrize("machine", MACHINES, ids=lambda names: names[0])
def test_what_the_project_depends_on_is_what_is_installed(machine: tuple[str, ...]) -> None:
    """pyproject.toml states ranges, deploy/requirements the versions that are installed: they must agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for name in ("demo", "bench", "silicon", "dev", "cuda") for text in extras[name])]
    names = ("base", "demo", "bench", "silicon", "dev", *machine)
    lines = [line for p in REQUIREMENTS if p.stem in names for line in p.read_text().splitlines() if "==" in line]
    pinned = dict(line.removeprefix("# ").split("==") for line in lines if not line.startswith("#"))
    wanted = map(Requirement, texts)
    missing = [r for r in wanted if not r.specifier.contains(pinned.get(canonicalize_name(r.name), "0"), prereleases=True)]
    assert missing == []


def test_no_package_is_pinned_twice_on_one_machine() -> None:
    everywhere = ("base", "demo", "bench", "silicon", "dev")
    for machine in MACHINES:
        files = [p for p in REQUIREMENTS if p.stem in (*everywhere, *machine)]
        names = [line.partition("==")[0] for p in files for line in p.read_text().splitlines() if not line.startswith("#")]
        assert sorted(names) == sorted(set(names))
