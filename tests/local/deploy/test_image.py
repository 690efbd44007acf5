"""The image: what its Dockerfile names exists, is pinned, and is what scripts/setup installs."""

from __future__ import annotations

import re

import pytest

from pdmux_ray import __version__
from tests.local.deploy.files import DEPLOY, ROOT, document

LINES = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
STEPS = [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in LINES if line and not line.startswith("#")]
PINNED = re.compile(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+[a-z0-9.-]*")
TAGS = [
    *(service["image"] for service in document("compose.yaml")["services"].values()),
    document("compose.gpu.yaml")["services"]["pdmux"]["image"],
]


def arguments(instruction: str) -> list[str]:
    return [argument for name, argument in STEPS if name == instruction]


@pytest.mark.parametrize("image", [*arguments("FROM"), *TAGS])
def test_every_image_is_pinned_to_a_release(image: str) -> None:
    assert PINNED.fullmatch(image)


def test_our_own_image_has_the_version_of_this_release() -> None:
    ours = [tag for tag in TAGS if tag.startswith("pdmux-ray:")]
    assert {tag.split(":")[1] for tag in ours} == {__version__, f"{__version__}-gpu"}


def test_everything_that_is_copied_exists_and_is_sent_to_the_builder() -> None:
    sources = [source for copy in arguments("COPY") for source in copy.split()[:-1]]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert sorted(line[1:] for line in kept if line.startswith("!")) == sorted(sources)
    assert kept[1] == "*"


def test_it_installs_the_pinned_requirements_of_the_device_it_is_built_for() -> None:
    files = set(re.findall(r"-r deploy/requirements/(\S+)\.txt", "\n".join(arguments("RUN"))))
    assert files == {"base", "${DEVICE}", "demo"}
    assert arguments("ARG") == ["DEVICE=cpu"]
    assert document("compose.gpu.yaml")["services"]["pdmux"]["build"]["args"] == {"DEVICE": "gpu"}


def test_what_has_no_place_in_the_requirements_is_what_scripts_setup_installs() -> None:
    apart = re.findall(r'_package="(\S+)"', (ROOT / "scripts/setup").read_text(encoding="utf-8"))
    installed = re.search(r"--no-deps ((?:\S+==\S+ ?)+)", "\n".join(arguments("RUN")))
    assert installed is not None
    assert sorted(installed[1].split()) == sorted(apart)


def test_it_runs_as_an_ordinary_user_from_the_last_step_on() -> None:
    (user,) = arguments("USER")
    assert int(user.split(":")[0]) > 0
    assert "RUN" not in [name for name, _ in STEPS[STEPS.index(("USER", user)) :]]
