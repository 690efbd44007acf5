"""The configuration: what loads, what is refused, and how the refusal reads."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from pdmux_ray.config import AppConfig, load_app_config, load_serve_config, parse_app_config, require_profile
from pdmux_ray.errors import ConfigError, RequestError
from pdmux_ray.types import Mode, Role, SamplingParams


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "applications: [{name: a, import_path: pdmux_ray.serve.app:build_app, args: {model: demo, engine: {max_batch: 3}}}]"
    )
    return path


def test_the_applications_args_are_the_configuration(config_file: Path) -> None:
    config = load_app_config(config_file)
    assert (config.model, config.engine.max_batch, config.engine.mode) == ("demo", 3, Mode.PREFILL_FIRST)


def test_a_topology_gives_each_rank_a_role() -> None:
    config = parse_app_config({"topology": {"prefill": 1, "mux": 1, "decode": 2}})
    assert config.roles == (Role.PREFILL, Role.MUX, Role.DECODE, Role.DECODE)
    assert parse_app_config({"instances": 2}).roles == (Role.MUX, Role.MUX)
    assert parse_app_config(config.model_dump(mode="json")) == config


def test_instances_of_a_role_with_options_of_its_own_are_a_deployment_of_their_own() -> None:
    near = {"resources": {"node_a": 1}}
    topology = {"prefill": 2, "mux": 1, "decode": 1, "ray_actor_options": {"prefill": near}}
    assert parse_app_config({"topology": topology}).groups == [
        ("Instance", (Role.MUX, Role.DECODE), {}),
        ("Instance-prefill", (Role.PREFILL, Role.PREFILL), near),
    ]
    assert parse_app_config({"topology": {"mux": 1, "ray_actor_options": {"mux": near}}}).groups == [
        ("Instance-mux", (Role.MUX,), near)
    ]
    assert parse_app_config({"instances": 2}).groups == [("Instance", (Role.MUX, Role.MUX), {})]


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_that_comes_along_is_valid(path: Path) -> None:
    load_app_config(path)


def test_no_args_means_all_defaults() -> None:
    assert parse_app_config({}) == AppConfig()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"modle": "demo"}, "modle: no such key; did you mean 'model'?"),
        ({"engine": {"max_batc": 1}}, "engine.max_batc: no such key; did you mean 'max_batch'?"),
        ({"engine": {"fake": {"steps": 1}}}, "engine.fake.steps: no such key; did you mean 'step_s'?"),
        ({"xyz": 1}, "xyz: no such key; there are cpus_per_instance, engine, gateway, gateways, instances, model, "),
        ({"topology": {"prefil": 1}}, "topology.prefil: no such key; did you mean 'prefill'?"),
        ({"topology": {"prefill": 1}}, "no instance decodes: set mux or decode to 1 at least"),
        ({"topology": {"mux": 1, "ray_actor_options": {"decode": {}}}}, "has decode, but no instance begins in that role"),
        ({"topology": {"mux": 1, "ray_actor_options": {"muxx": {}}}}, "Input should be 'mux', 'prefill' or 'decode'"),
        ({"topology": {"mux": 2}, "instances": 2}, "topology says how many instances there are: leave `instances` out"),
        ({"engine": {"transfer": {"silence_s": 0.4}}}, "silence_s (0.4) is shorter than two heartbeats (0.25 s each)"),
        ({"engine": {"transfer": {"lease_s": 0.2}}}, "lease_s (0.2) is not longer than heartbeat_s (0.25), by which peers say"),
        ({"engine": {"transfer": {"drain_s": 0.25}}}, "drain_s (0.25) is not longer than heartbeat_s (0.25)"),
        ({"engine": {"max_batch": 0}}, "engine.max_batch: Input should be greater than 0"),
        (
            {"engine": {"mode": "best"}},
            "engine.mode: Input should be 'prefill_first', 'chunked', 'time_shared', 'split', 'capped' or 'auto'",
        ),
        ({"engine": {"kv_cache_gib": float("inf")}}, "engine.kv_cache_gib"),
        ("demo", "(top)"),
    ],
)
def test_a_wrong_key_or_value_is_named(args: object, words: str) -> None:
    with pytest.raises(ConfigError, match="args are wrong") as caught:
        parse_app_config(args)
    assert words in str(caught.value)


def test_an_override_reaches_both_the_document_and_the_configuration(config_file: Path) -> None:
    document, config = load_serve_config(config_file, ["engine.mode=chunked", "gateway.max_prompts=2", "model=/a=b"])
    assert document["applications"][0]["args"]["engine"] == {"max_batch": 3, "mode": "chunked"}
    assert (config.engine.mode, config.gateway.max_prompts, config.model) == (Mode.CHUNKED, 2, "/a=b")


def test_files_are_found_beside_the_config_and_those_of_an_override_where_one_is(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = config_file.read_text().replace("max_batch: 3", "multiplex: {table: tables/t.yaml, profile: /p.json}")
    config_file.write_text(text)
    found = load_app_config(config_file).engine.multiplex
    assert (found.table, found.profile) == (str(config_file.parent / "tables" / "t.yaml"), "/p.json")
    (elsewhere := config_file.parent / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    document, config = load_serve_config(config_file, ["engine.multiplex.table=u.yaml"])
    assert config.engine.multiplex.table == str(elsewhere / "u.yaml")
    assert document["applications"][0]["args"]["engine"]["multiplex"]["table"] == str(elsewhere / "u.yaml")


@pytest.mark.parametrize(
    "override", ["engine.mode", "=3", "engine.=3", "model.name=x", "engine.mode=[", "engine.modus=chunked"]
)
def test_an_override_that_makes_no_sense_is_refused(config_file: Path, override: str) -> None:
    with pytest.raises(ConfigError):
        load_serve_config(config_file, [override])


@pytest.mark.parametrize(
    "text",
    [
        *("", "applications: []", "just text", "applications: [", "[1]", "applications: [1]", "applications: text"),
        *("applications: {a: 1}", "since: 2020-13-45", "applications: [{}, {}]"),
    ],
)
def test_a_file_that_is_no_serve_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"serve\.yaml"):
        load_app_config(path)


@pytest.mark.parametrize("args", ["[1]", "1", "text"])
@pytest.mark.parametrize("overrides", [[], ["engine.max_batch=3"]])
def test_args_that_are_no_group_of_settings_are_refused(tmp_path: Path, args: str, overrides: list[str]) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(f"applications: [{{import_path: pdmux_ray.serve.app:build_app, args: {args}}}]")
    with pytest.raises(ConfigError, match="args are wrong"):
        load_serve_config(path, overrides)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}, arg: {model: demo}", "applications.0.arg: no such key; did you mean 'args'?"),
        ("{}", "the application has no `args:`"),
        ("{}, args: {}, 7: 1", "applications.0.7: no such key; there are args, "),
    ],
)
def test_a_wrong_key_of_the_application_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("applications: [{" + text.replace("{}", "import_path: pdmux_ray.serve.app:build_app", 1) + "}]")
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_serve_config(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("http_option: {port: 1}", "http_option: no such key; did you mean 'http_options'?"),
        ("http_options: {prot: 1}", "http_options.prot: no such key; did you mean 'port'?"),
        ("http_options: [1]", "http_options is not a group"),
        ("proxy_location: Headonly", "proxy_location must be one of Disabled, EveryNode, HeadOnly, not 'Headonly'"),
        ("proxy_location: [HeadOnly]", "proxy_location must be one of"),
    ],
)
def test_a_wrong_key_or_value_of_the_file_is_named(config_file: Path, line: str, words: str) -> None:
    config_file.write_text(f"{config_file.read_text()}\n{line}")
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_serve_config(config_file)


@pytest.mark.parametrize("import_path", ["import_path: pdmux_ray.serve.app:build_ap, ", ""])
def test_only_this_projects_application_is_taken(tmp_path: Path, import_path: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(f"applications: [{{{import_path}args: {{}}}}]")
    with pytest.raises(ConfigError, match=r"import_path must be pdmux_ray\.serve\.app:build_app, not "):
        load_serve_config(path)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_bytes(b"applications: [{args: {model: \xff}}]")
    with pytest.raises(ConfigError, match="cannot read"):
        load_app_config(path)


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ({}, "demo"),
        ({"model": "owner/model"}, "model"),
        ({"model": "/models/a/"}, "a"),
        ({"model": "."}, "here"),
        ({"model": "../here/.."}, "there"),
        ({"model": "/models/a", "served_model_name": "b"}, "b"),
    ],
)
def test_a_model_is_called_by_its_last_part_unless_it_is_given_a_name(
    args: dict[str, object], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "there" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    assert parse_app_config(args).model_name == name


@pytest.mark.parametrize(
    ("engine", "reads"), [({}, True), ({"load": "dummy"}, False), ({"device": "fake"}, False), ({"device": "cpu"}, True)]
)
def test_weights_are_read_unless_the_device_or_the_user_makes_them_up(engine: dict[str, object], reads: bool) -> None:
    assert parse_app_config({"engine": engine}).engine.reads_weights is reads


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": float("nan")},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"max_tokens": 0},
        {"seed": 2**63},
        {"logprobs": 21},
        {"min_tokens": 9, "max_tokens": 8},
    ],
)
def test_a_sampling_parameter_out_of_range_names_itself(params: dict[str, object]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert caught.value.param == next(iter(params))


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ({"pinned": {"3": "prefill"}}, "'3' is no rank: 3 instances have 0 to 2"),
        ({"pinned": {"01": "mux"}}, "'01' is no rank"),
        ({"pinned": {"": "mux"}}, "at least 1 character"),
        ({"pinned": {"0": "prefill", "1": "prefill", "2": "prefill"}}, "all instances prefill"),
        ({"prefill": {"min": 3}}, "need 4 instances, and there are 3"),
        ({"prefill": {"min": 2}, "decode": {"min": 2}}, "need 4 instances, and there are 3"),
        ({"pinned": {"2": "prefill", "1": "decode", "an-id": "mux"}, "prefill": {"min": 2, "max": 9}}, None),
        ({"pinned": {"3": "prefill"}, "replicas": {"min": 2, "max": 4}}, None),
        ({"pinned": {"3": "prefill"}, "enabled": False}, None),
    ],
)
def test_what_placement_could_never_keep_is_refused(placement: dict[str, object], words: str | None) -> None:
    args = {"topology": {"prefill": 1, "mux": 2}, "placement": {"enabled": True, **placement}}
    with pytest.raises(ConfigError, match=re.escape(words)) if words else contextlib.nullcontext():
        parse_app_config(args)


@pytest.mark.parametrize(
    ("args", "refused"),
    [
        ({}, True),
        ({"gateway": {"routing": {"policy": "threshold"}}}, False),
        ({"engine": {"multiplex": {"profile": "p.json"}}}, False),
        ({"engine": {"device": "fake"}}, False),
    ],
)
def test_a_server_that_routes_by_prediction_needs_a_profile(args: dict[str, object], refused: bool) -> None:
    config = parse_app_config({"topology": {"prefill": 1, "mux": 1}, **args})
    with pytest.raises(ConfigError, match=r"profile is missing.*pdmux profile CONFIG") if refused else contextlib.nullcontext():
        require_profile(config)
    require_profile(parse_app_config({**args, "instances": 2}))
