"""The configuration: frozen models, unknown keys are errors, the default of every key stands here and nowhere else.

An application's `args:` in a Serve config file is an `AppConfig`; `configs/cpu-demo.yaml` shows one. "auto" values are
resolved by whoever knows the answer (the device, the model), never written back.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from pdmux_ray.config_base import FROZEN, NonNegativeInt, PositiveFloat, PositiveInt
from pdmux_ray.config_placement import PlacementConfig
from pdmux_ray.config_transfer import TransferConfig as TransferConfig
from pdmux_ray.errors import ConfigError
from pdmux_ray.types import Mode, Role, RoutePolicy

CPU_KV_CACHE_GIB = 1.0

IMPORT_PATH = "pdmux_ray.serve.app:build_app"
SCALING_POLICY = "pdmux_ray.serve.scaling:FollowPlan"
# What Ray Serve knows in a config file. It passes over any other key in silence, so it is checked here, without Ray; a test
# compares these with the Ray that is installed.
PROXY_LOCATIONS = frozenset({"Disabled", "HeadOnly", "EveryNode"})
DOCUMENT_KEYS = frozenset(
    {
        *("proxy_location", "http_options", "grpc_options", "controller_options", "logging_config", "tracing_config"),
        *("applications", "target_capacity"),
    }
)
APPLICATION_KEYS = frozenset(
    {
        *("name", "route_prefix", "import_path", "runtime_env", "host", "port", "deployments", "autoscaling_policy", "args"),
        *("logging_config", "external_scaler_enabled"),
    }
)
HTTP_KEYS = frozenset(
    {
        *("host", "port", "root_path", "request_timeout_s", "keep_alive_timeout_s"),
        *("ssl_keyfile", "ssl_certfile", "ssl_keyfile_password", "ssl_ca_certs"),
    }
)


class _Frozen(BaseModel):
    model_config = FROZEN


class FakeConfig(_Frozen):
    """The fake device (`device: fake`): no model, made-up tokens, seconds that pass as configured.

    With `gpu` it keeps the time of that model on that GPU (`costs/gpu.py`), and has its layers and units: the other keys but
    `pages` and `most_steps` then say nothing.
    """

    gpu: Literal["H200", "H100", "B200", "A100", "A800"] | None = None
    # of the model that it keeps the time of
    shape: Literal["llama-8b", "llama-70b", "codellama-34b", "qwen3-32b", "opt-13b", "opt-66b", "opt-175b"] = "llama-8b"
    step_s: Annotated[float, Field(ge=0)] = 0.02  # of any step, on the whole device
    prefill_s_per_token: Annotated[float, Field(ge=0)] = 0.0  # added per prefill token
    pages: PositiveInt = 4096
    units: PositiveInt = 8
    layers: PositiveInt = 8
    most_steps: PositiveInt = 1  # decode steps that it takes at once


class MultiplexConfig(_Frozen):
    """How prefill and decode share the device in the modes time_shared, split, capped and auto."""

    policy: Literal["slo", "sglang", "fixed"] = "slo"  # slo: by predicted latency; sglang: the published rule; fixed: one split
    profile: str | None = None  # the file that `pdmux profile` wrote; policy slo needs it
    ttft_s: PositiveFloat | None = None  # objectives; policy slo needs itl_s
    ttft_s_per_token: Annotated[float, Field(ge=0)] = 0.0  # a prompt token gives the first token so much longer
    itl_s: PositiveFloat | None = None
    admission: Literal["queue", "refuse"] = "queue"  # refuse: a 429 when the predicted TTFT misses its objective
    decode_units: PositiveInt | None = None  # policy fixed: of every step that does both; None: half
    block_layers: PositiveInt | None = None  # policy fixed: layers of a block; None: all
    table: str | None = None  # policy sglang: a file in the published YAML format; None: its defaults


class CudaConfig(_Frozen):
    """The CUDA device (`device: cuda`)."""

    index: NonNegativeInt = 0  # which GPU, of those that this process sees
    # (prefill, decode) SMs of each split; None: decode gets about 1/8, 1/4, 3/8, 1/2, 5/8 and 3/4 of them
    splits: tuple[tuple[PositiveInt, PositiveInt], ...] | None = None
    # batch sizes that decode graphs are captured for, at each split; None: 1, 2, 4, 8, 16, 24, … up to max_batch
    decode_buckets: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    look_ahead: PositiveInt = 4  # decode steps that may be launched at once, each fed by the one before
    # without engine.kv_cache_gib: the pool's share of the memory that weights, buffers, workspaces and graphs leave free
    kv_share: Annotated[float, Field(gt=0, lt=1)] = 0.9
    # triton: our own kernel, on any GPU; varlen: torch's (2.12.1 or later), with page_size 256; flashinfer: where it is there
    prefill_attention: Literal["triton", "varlen", "flashinfer"] = "triton"


class EngineConfig(_Frozen):
    """One instance: its device, its KV pool and how it makes up its steps."""

    device: Literal["auto", "cpu", "cuda", "fake"] = "auto"  # auto: cuda where there is a GPU, else cpu
    # auto: bfloat16 where the device computes it natively, else float32 (on a GPU float16)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load: Literal["weights", "dummy"] = "weights"  # dummy: random weights of the model's shape
    threads: PositiveInt | None = None  # CPU threads of the device; None: all cores this process may use
    mode: Mode = Mode.PREFILL_FIRST
    multiplex: MultiplexConfig = MultiplexConfig()
    chunk_tokens: PositiveInt = 512  # chunked: token budget of a step
    # prefill_first: prompts together in one step, as long as they fit this (the first always does); with lanes: prompts
    # together in one job, likewise, and the longest chunk of `auto`
    max_prefill_tokens: PositiveInt = 2048
    max_batch: PositiveInt = 64  # requests that hold pages at once
    max_waiting: PositiveInt = 256  # beyond it a request is refused (429)
    context_length: PositiveInt | None = None  # None: what the model states
    page_size: PositiveInt = 16  # tokens
    kv_cache_gib: PositiveFloat | None = None  # None: CPU_KV_CACHE_GIB; on a GPU a share of what is left (cuda.kv_share)
    prefix_cache: bool = True
    stall_timeout_s: PositiveFloat = 60.0  # a step that takes longer makes the instance unhealthy
    cuda: CudaConfig = CudaConfig()
    fake: FakeConfig = FakeConfig()
    transfer: TransferConfig = TransferConfig()

    @property
    def reads_weights(self) -> bool:
        return self.load == "weights" and self.device != "fake"


class RoutingConfig(_Frozen):
    """Where requests are prefilled, in an application with a topology."""

    # predict: by predicted latency (engine.multiplex.profile); threshold: long ones elsewhere; local: never; remote: always
    policy: RoutePolicy = "predict"
    threshold_tokens: PositiveInt = 512  # policy threshold: with so many left to prefill, or more
    bandwidth: PositiveFloat = 1e9  # of a transfer, bytes a second, until enough has been moved to know it


class TracingConfig(_Frozen):
    """OpenTelemetry spans of requests. What their receiver asks for (a key, a certificate) stands in the environment of the
    gateways, in OTEL_EXPORTER_OTLP_HEADERS and the exporter's other variables."""

    endpoint: Annotated[str, Field(pattern="^https?://[^/]")]  # takes OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces
    # of requests whose caller has not decided, as a `traceparent` header does
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    service_name: str = "pdmux-ray"


class SloConfig(_Frozen):
    """Objectives of a tier: docs/goodput.md says which requests keep them. What is not given has no limit."""

    ttft_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    ttft_s_per_token: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # of the prompt, in addition
    itl_s: PositiveFloat | None = None
    itl_statistic: Literal["mean", "p50", "p90", "p95", "p99", "max"] = "p99"  # of a request's own gaps

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ttft_s is None and self.ttft_s_per_token:
            raise ValueError("ttft_s_per_token adds to ttft_s: give that, too (0 is allowed)")
        if self.ttft_s == 0 and not self.ttft_s_per_token:
            raise ValueError("no first token comes within 0 s: raise ttft_s, or leave it out for no limit")
        return self


class GatewayConfig(_Frozen):
    """The HTTP front: limits and keys."""

    api_keys_env: str | None = None  # environment variable with comma-separated keys; None: no key is asked for
    max_body_bytes: PositiveInt = 4 * 2**20
    max_prompts: PositiveInt = 64  # prompts (times n) of one HTTP request
    request_timeout_s: PositiveFloat = 600.0  # from arrival to last token
    default_max_tokens: PositiveInt | None = None  # None: up to the context length for chat, 16 for completions
    discovery_period_s: PositiveFloat = 5.0  # how often the instances are listed (more often while there is none)
    routing: RoutingConfig = RoutingConfig()
    tracing: TracingConfig | None = None  # None: nobody is told
    # Tier -> its objectives, for the metrics; a request names its tier by `service_tier`. "default" is always there, with those
    # of engine.multiplex unless it is given.
    slo: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")], SloConfig] = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "auto" in self.slo:
            raise ValueError("slo.auto: a request that asks for service tier auto gets the one named default: use that name")
        return self


class TopologyConfig(_Frozen):
    """How many instances begin in each role. Roles may change while the server runs: `pdmux role`."""

    prefill: NonNegativeInt = 0
    mux: NonNegativeInt = 0
    decode: NonNegativeInt = 0
    # By the role that they begin in: what instances ask Ray for (`resources`, `label_selector`, …), and so on which nodes they
    # run. Each role that is named here makes a Serve deployment of its own, "Instance-ROLE".
    ray_actor_options: dict[Role, dict[str, Any]] = {}

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of the instances, in the order of their ranks."""
        return (Role.PREFILL,) * self.prefill + (Role.MUX,) * self.mux + (Role.DECODE,) * self.decode

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.mux + self.decode:
            raise ValueError("no instance decodes: set mux or decode to 1 at least")
        if unused := [role.value for role in self.ray_actor_options if role not in self.roles]:
            raise ValueError(f"ray_actor_options has {', '.join(unused)}, but no instance begins in that role")
        return self


class InstanceGroup(NamedTuple):
    """Instances that ask Ray for the same: the replicas of one Serve deployment."""

    name: str
    roles: tuple[Role, ...]  # by rank
    ray_actor_options: dict[str, Any]  # beside CPUs


class AppConfig(_Frozen):
    """Everything `build_app` takes."""

    model: str = "demo"  # "demo", a Hugging Face directory, or a hub id
    served_model_name: Annotated[str, Field(min_length=1)] | None = None  # None: the directory's or hub id's last part
    instances: PositiveInt = 1  # that do all of a request; for others see topology
    topology: TopologyConfig | None = None  # instead of `instances`: roles, and KV that goes between instances over NIXL
    cpus_per_instance: Annotated[float, Field(ge=0)] = 1.0  # that Ray sets aside for each; not how many it computes on
    gateways: PositiveInt = 1
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    placement: PlacementConfig = PlacementConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.topology is not None and self.instances != 1:
            raise ValueError("topology says how many instances there are: leave `instances` out")
        if self.placement.enabled and self.topology is None:
            raise ValueError("placement changes roles, which instances without a topology do not have: give a topology")
        if self.placement.replicas is not None and self.topology is not None and self.topology.ray_actor_options:
            raise ValueError("placement.replicas is for instances that ask Ray for the same: leave ray_actor_options out")
        if self.placement.enabled:
            self.placement.check(len(self.roles))
        return self

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of all instances."""
        return self.topology.roles if self.topology is not None else (Role.MUX,) * self.instances

    @property
    def groups(self) -> list[InstanceGroup]:
        """All instances."""
        placed = self.topology.ray_actor_options if self.topology is not None else {}
        rest = tuple(role for role in self.roles if role not in placed)
        groups = [InstanceGroup("Instance", rest, {})] if rest else []
        for role, options in placed.items():
            groups.append(InstanceGroup(f"Instance-{role.value}", (role,) * self.roles.count(role), options))
        return groups

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or os.path.basename(os.path.abspath(os.path.expanduser(self.model))) or self.model


def require_profile(config: AppConfig) -> None:
    """Of a server that is to route or place by prediction. Raises ConfigError. (What is only to be profiled has none yet.)"""
    if config.engine.device == "fake" or config.engine.multiplex.profile is not None:
        return
    missing = (
        "engine.multiplex.profile is missing: {} predicted times. Run `pdmux profile CONFIG --out FILE` and name the file, "
    )
    if config.topology is not None and config.gateway.routing.policy == "predict":
        words = missing.format("gateway.routing.policy predict chooses by")
        raise ConfigError(words + "or use policy threshold, local or remote.")
    if config.placement.enabled:
        raise ConfigError(missing.format("the placement knows what instances can do by") + "or leave placement.enabled out.")


def parse_app_config(values: Any) -> AppConfig:
    """Validates `args:`. Raises ConfigError that names each wrong key and what is wrong with it."""
    try:
        return AppConfig.model_validate(values)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, e['loc'])) or '(top)'}: "
            + (_unknown_setting(e["loc"]) if e["type"] == "extra_forbidden" else e["msg"])
            for e in error.errors()
        ]
        raise ConfigError("the application's args are wrong:\n" + "\n".join(lines)) from None


def _unknown_setting(where: Sequence[int | str]) -> str:
    *groups, key = where
    model: Any = AppConfig
    for group in groups:
        annotation = model.model_fields[group].annotation
        model = next((kind for kind in get_args(annotation) if hasattr(kind, "model_fields")), annotation)
    return _no_such_key(key, model.model_fields)


def _no_such_key(key: object, known: Collection[str]) -> str:
    near = difflib.get_close_matches(str(key), known, n=1)
    return f"no such key; did you mean {near[0]!r}?" if near else f"no such key; there are {', '.join(sorted(known))}"


def load_serve_config(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], AppConfig]:
    """A Serve config file and its application's `args:`, both with `overrides` applied. Raises ConfigError.

    An override is `KEY=VALUE` with a dotted key of AppConfig and a YAML value, such as `engine.mode=chunked`. Files (profile,
    table) are relative to the config file, in an override to the working directory; both become absolute.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    application = _the_application(path, document)
    args = application["args"] = application["args"] or {}
    parse_app_config(args)  # what is wrong in the file is said of the file, not of an override
    _anchor_files(args, path.parent)
    for override in overrides:
        _override(args, override)
    parse_app_config(args)
    _anchor_files(args, Path.cwd())
    config = parse_app_config(args)
    if config.placement.replicas is not None and application.get("autoscaling_policy") is None:
        raise ConfigError(
            f"{path}: placement.replicas does nothing without the application's autoscaling_policy. Add, beside import_path: "
            f'autoscaling_policy: {{policy_function: "{SCALING_POLICY}"}}'
        )
    return document, config


def _anchor_files(args: dict[str, Any], directory: Path) -> None:
    """Valid `args`: replicas do not run where the config file lies."""
    settings = args.get("engine", {}).get("multiplex", {})
    for key in ("profile", "table"):
        if settings.get(key) is not None:
            settings[key] = str((directory / Path(settings[key]).expanduser()).absolute())


def _the_application(path: Path, document: Any) -> dict[str, Any]:
    """The document's one application, when what stands around its `args` is right. Raises ConfigError."""
    if isinstance(document, dict):
        _require_known(path, "", document, DOCUMENT_KEYS)
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list) or not applications or not isinstance(applications[0], dict):
        raise ConfigError(f"{path} is not a Serve config file: it has no `applications:` list with an application in it")
    if len(applications) > 1:
        raise ConfigError(f"{path} has {len(applications)} applications; give each a file and a server of its own")
    application, http = applications[0], document.get("http_options")
    if http is not None and not isinstance(http, dict):
        raise ConfigError(f"{path}: http_options is not a group of settings")
    _require_known(path, "http_options.", http or {}, HTTP_KEYS)
    _require_known(path, "applications.0.", application, APPLICATION_KEYS)
    location = document.get("proxy_location", "HeadOnly")
    if not isinstance(location, str) or location not in PROXY_LOCATIONS:
        raise ConfigError(f"{path}: proxy_location must be one of {', '.join(sorted(PROXY_LOCATIONS))}, not {location!r}")
    if application.get("import_path") != IMPORT_PATH:
        raise ConfigError(f"{path}: import_path must be {IMPORT_PATH}, not {application.get('import_path')!r}")
    if "args" not in application:
        raise ConfigError(
            f"{path}: the application has no `args:`, where its settings stand (`args: {{}}` takes every default)"
        )
    return application


def _require_known(path: Path, place: str, group: dict[Any, Any], known: Collection[str]) -> None:
    for key in group:
        if key not in known:
            raise ConfigError(f"{path}: {place}{key}: {_no_such_key(key, known)}")


def _override(args: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    *path, last = key.split(".")
    for part in path:
        args = args.setdefault(part, {})
        if not isinstance(args, dict):
            raise ConfigError(f"{override!r}: {part} is not a group of settings")
    try:
        args[last] = yaml.safe_load(value)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{override!r}: the value is not YAML: {error}") from None
    if not equals or not last:
        raise ConfigError(f"{override!r} is not of the form KEY=VALUE, such as engine.mode=chunked")


def load_app_config(path: Path) -> AppConfig:
    """The application's `args:` of a Serve config file. Raises ConfigError."""
    return load_serve_config(path)[1]
