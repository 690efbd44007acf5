"""What `pdmux_ray.config` writes down of Ray Serve's config file, beside the Ray that is installed. Starts nothing."""

from __future__ import annotations

import pytest
from pydantic import BaseModel
from ray.serve.config import ProxyLocation
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from pdmux_ray.config import APPLICATION_KEYS, DOCUMENT_KEYS, HTTP_KEYS, PROXY_LOCATIONS

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("schema", "keys"),
    [(ServeDeploySchema, DOCUMENT_KEYS), (ServeApplicationSchema, APPLICATION_KEYS), (HTTPOptionsSchema, HTTP_KEYS)],
)
def test_the_keys_of_a_config_file_are_those_that_serve_knows(schema: type[BaseModel], keys: frozenset[str]) -> None:
    assert keys == schema.model_fields.keys()


def test_the_proxy_locations_are_those_that_serve_knows() -> None:
    assert {location.value for location in ProxyLocation} == PROXY_LOCATIONS
