"""The HTTP surface of a gateway: paths, keys, body limit, and every error in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from pdmux_ray import __version__
from pdmux_ray.errors import PdmuxError, RequestError
from pdmux_ray.serve.answer import outcome
from pdmux_ray.serve.keys import allowed
from pdmux_ray.serve.problems import BodyTooLargeError, KeyRefusedError, Problem, UnknownModelError, from_status, problem
from pdmux_ray.serve.tracing import CONTEXT_HEADERS, Headers, Trace

BODY_S = 60.0  # a body that takes longer to come is given up
TIMELINE_S = 60.0  # the part of a timeline that is told unless the client says

MAX_ADMIN_BYTES = 4096

READ = ["GET", "HEAD"]

Handler = Callable[[bytes, Trace], Awaitable[Response]]


class Backend(Protocol):
    """What the HTTP surface needs of its gateway."""

    api_keys: frozenset[bytes]
    max_body_bytes: int

    async def chat(self, raw: bytes, trace: Trace) -> Response: ...

    async def complete(self, raw: bytes, trace: Trace) -> Response: ...

    def trace(self, path: str, headers: Headers) -> Trace:
        """Of a request that has just come; `headers`: those of CONTEXT_HEADERS."""

    def models(self) -> list[dict[str, Any]]: ...

    def health(self) -> tuple[bool, dict[str, str]]:
        """Whether requests can be served now, and what is wrong by instance."""

    def exposition(self) -> bytes: ...

    async def targets(self) -> list[dict[str, Any]]:
        """Where each process of the application has its metrics, for Prometheus' HTTP service discovery. Raises
        InstanceUnavailableError."""

    async def timeline(self, instance: str | None, seconds: float) -> bytes:
        """A trace, as JSON, of the last `seconds`. Raises RequestError, InstanceUnavailableError."""

    def instances(self) -> list[dict[str, Any]]: ...

    async def assign(self, instance: str, role: str) -> None:
        """Raises RequestError, InstanceUnavailableError."""


def build_http_app(gateway: Backend) -> FastAPI:
    """Open to everyone: /health and /version. All else, also /metrics (it tells how much traffic there is), asks for a key
    when keys are configured.

    /health is 200 exactly while a completion would be routed: there is an instance whose step loop is known to go round and
    that takes requests. What is wrong with each of the others is in the body, also then.
    """
    app = FastAPI(title="pdmux-ray", version=__version__, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(PdmuxError, _on_error)
    app.add_exception_handler(Exception, _on_error)  # of its own accord this one also logs the error as the server's
    app.add_exception_handler(HTTPException, _on_http_exception)
    keyed = [Depends(_key_check(gateway.api_keys))]

    async def chat(request: Request) -> Response:
        return await _answer(gateway, gateway.chat, request)

    async def complete(request: Request) -> Response:
        return await _answer(gateway, gateway.complete, request)

    async def models() -> dict[str, Any]:
        return {"object": "list", "data": gateway.models()}

    async def model(model_id: str) -> Response:
        return _card(gateway, model_id)

    async def health() -> Response:
        well, troubles = gateway.health()
        return JSONResponse({"status": "ok" if well else "unhealthy", "troubles": troubles}, 200 if well else 503)

    async def version() -> dict[str, str]:
        return {"version": __version__}

    for path, endpoint, methods, dependencies in (
        ("/v1/chat/completions", chat, ["POST"], keyed),
        ("/v1/completions", complete, ["POST"], keyed),
        ("/v1/models", models, READ, keyed),
        ("/v1/models/{model_id:path}", model, READ, keyed),
        ("/health", health, READ, []),
        ("/version", version, READ, []),
    ):
        app.add_api_route(path, endpoint, methods=methods, dependencies=dependencies, response_model=None)
    _add_metrics(app, gateway, keyed)
    _add_admin(app, gateway, keyed)
    return app


def _add_metrics(app: FastAPI, gateway: Backend, keyed: Sequence[Any]) -> None:
    """What this gateway knows, and where each process tells its own."""

    async def metrics() -> Response:
        return PlainTextResponse(gateway.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def targets() -> Response:
        return JSONResponse(await gateway.targets())

    app.add_api_route("/metrics", metrics, methods=READ, dependencies=keyed, response_model=None)
    app.add_api_route("/metrics/targets", targets, methods=READ, dependencies=keyed, response_model=None)


def _add_admin(app: FastAPI, gateway: Backend, keyed: Sequence[Any]) -> None:
    """What is for those who run the server: which instances there are, another role for one of them, what they did lately."""

    async def instances() -> dict[str, Any]:
        return {"instances": gateway.instances()}

    async def assign(request: Request) -> Response:
        return await _assign(gateway, request)

    async def timeline(request: Request) -> Response:
        return await _timeline(gateway, request)

    app.add_api_route("/admin/instances", instances, methods=READ, dependencies=keyed, response_model=None)
    app.add_api_route("/admin/role", assign, methods=["POST"], dependencies=keyed, response_model=None)
    app.add_api_route("/debug/timeline", timeline, methods=READ, dependencies=keyed, response_model=None)


def _card(gateway: Backend, model_id: str) -> Response:
    for card in gateway.models():
        if card["id"] == model_id:
            return JSONResponse(card)
    return _response(problem(UnknownModelError(f"The model {model_id!r} does not exist.", "model")))


async def _timeline(gateway: Backend, request: Request) -> Response:
    asked = request.query_params
    trace = await gateway.timeline(asked.get("instance"), _seconds(asked.get("seconds")))
    return Response(trace, media_type="application/json")


async def _assign(gateway: Backend, request: Request) -> Response:
    """{"instance": id, "role": role}; answers with all instances."""
    try:
        asked = json.loads(await _body(request, MAX_ADMIN_BYTES))
        instance, role = asked["instance"], asked["role"]
    except (ValueError, TypeError, KeyError):
        raise RequestError('The body must be {"instance": ID, "role": ROLE}; GET /admin/instances lists the ids.') from None
    await gateway.assign(str(instance), str(role))
    return JSONResponse({"instances": gateway.instances()})


def _seconds(text: str | None) -> float:
    """Raises RequestError."""
    try:
        seconds = float(text) if text is not None else TIMELINE_S
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise RequestError(f"seconds must be a number of seconds, 0 or more, got {text!r}.", param="seconds")
    return seconds


async def _answer(gateway: Backend, handler: Handler, request: Request) -> Response:
    trace = gateway.trace(request.url.path, {name: request.headers.getlist(name) for name in CONTEXT_HEADERS})
    try:
        response = await handler(await _body(request, gateway.max_body_bytes), trace)
    except BaseException as error:
        trace.ended(outcome(error), error)
        if not isinstance(error, Exception) or (known := problem(error)).status == 500:
            raise
        response = _response(known)
    response.headers.update(trace.headers)
    return response


async def _body(request: Request, max_bytes: int) -> bytes:
    """Reads the body as far as it is allowed to be long. Raises BodyTooLargeError before it is read whole, HTTPException."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise HTTPException(415, "A compressed body is not read here; send it without Content-Encoding")
    too_large = BodyTooLargeError(f"The body is larger than {max_bytes} bytes, the limit of this server.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        message = f"The body was not there within {BODY_S:g} s; send it faster"
        raise HTTPException(408, message, {"connection": "close"}) from None
    return bytes(body)


def _key_check(keys: frozenset[bytes]) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        if not allowed(keys, request.headers.get("authorization", "")):
            raise KeyRefusedError("A valid API key is needed: send it as `Authorization: Bearer <key>`.")

    return check


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"{error.detail}: {request.method} {request.url.path}"
    return _response(from_status(error.status_code, detail, dict(error.headers or {})))


async def _on_error(request: Request, error: Exception) -> Response:
    return _response(problem(error))


def _response(known: Problem) -> Response:
    # ASCII, because a message may quote text of the client's that is no valid Unicode.
    return Response(json.dumps(known.body()), known.status, known.headers, "application/json")
