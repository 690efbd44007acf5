"""What `overhead` measures: this project's application on the fake device, and a bare one-hop SSE echo, in one Serve.

The echo is what people write first: a FastAPI ingress whose endpoint returns a StreamingResponse over an async generator.
It has no queue, no engine and no limits; a token costs it a sleep and a `json.dumps`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator

import ray
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray import serve

from pdmux_ray.config import AppConfig, EngineConfig, FakeConfig
from pdmux_ray.serve.app import build_app

echo_http = FastAPI()


@serve.ingress(echo_http)
class Echo:
    """Streams `max_tokens` chat chunks, one every `1 / rate` seconds."""

    @echo_http.post("/chat")
    async def chat(self, body: dict[str, int]) -> StreamingResponse:
        return StreamingResponse(self._tokens(body["max_tokens"], 1 / body["rate"]), media_type="text/event-stream")

    async def _tokens(self, count: int, period_s: float) -> AsyncIterator[str]:
        for number in range(count):
            await asyncio.sleep(period_s)
            choice = {"index": 0, "delta": {"content": f" token{number}"}, "logprobs": None, "finish_reason": None}
            chunk = {
                "id": "chatcmpl-0123456789abcdef0123456789abcdef",
                "object": "chat.completion.chunk",
                "created": 1700000000,
                "model": "demo",
                "choices": [choice],
            }
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"


def main(port: int, model: str, step_s: float) -> None:
    """Serves both until SIGTERM; prints READY when they answer."""
    ray.init(num_cpus=2, include_dashboard=False, logging_level="warning", log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        engine = EngineConfig(device="fake", fake=FakeConfig(step_s=step_s))
        serve.run(build_app(AppConfig(model=model, served_model_name="demo", engine=engine)), name="pdmux", route_prefix="/")
        serve.run(
            serve.deployment(Echo, name="Echo", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}).bind(),
            name="echo",
            route_prefix="/echo",
        )
        print("READY", flush=True)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
