from __future__ import annotations

import json

from pdmux_ray.errors import RequestError
from pdmux_ray.serve.problems import UnknownModelError, problem


def test_a_message_does_not_give_back_all_that_the_client_sent() -> None:
    long = "x" * 3_000_000
    error = problem(UnknownModelError(f"The model {long!r} does not exist; this server has 'm'.", long)).body()["error"]
    assert error["message"].startswith("The model 'xxx")
    assert error["message"].endswith("does not exist; this server has 'm'.")
    assert len(json.dumps(error)) < 1000


def test_a_message_of_usual_length_is_given_whole() -> None:
    words = "y" * 300
    assert problem(RequestError(words, "n")).body()["error"]["message"] == words
