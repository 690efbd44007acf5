"""What a gateway does for a completion: validate, tokenize, choose an instance, submit, answer. Knows nothing of HTTP paths."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from pdmux_ray.config import GatewayConfig
from pdmux_ray.errors import ContextLengthError, RequestError
from pdmux_ray.metrics.gateway_metrics import GatewayMetrics
from pdmux_ray.metrics.goodput import Verdict
from pdmux_ray.metrics.tiers import Tier, tier_of
from pdmux_ray.model.source import ModelFiles
from pdmux_ray.serve.answer import Answer, is_miss, outcome
from pdmux_ray.serve.dispatch import Dispatch
from pdmux_ray.serve.generation import Choice, UsageAsked
from pdmux_ray.serve.links import Link, Links
from pdmux_ray.serve.openai import ChatRequest, CompletionRequest, parse
from pdmux_ray.serve.problems import UnknownModelError
from pdmux_ray.serve.replies import ChatReply, CompletionReply, KeptNames, Reply
from pdmux_ray.serve.sse import EventStream
from pdmux_ray.serve.tracing import UNTRACED, Trace
from pdmux_ray.text.stream import TextStream
from pdmux_ray.text.tokenizer import Tokenizer
from pdmux_ray.types import NewRequest

# A body up to this size is parsed, checked and tokenized on the event loop, in a few milliseconds at most; a larger one in a
# thread, whatever it is made of.
INLINE_BYTES = 16 * 2**10
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model as this server offers it."""

    name: str
    files: ModelFiles
    created: int  # seconds since the epoch; when the application was built


@dataclass(frozen=True, slots=True)
class Job:
    """A valid request: what is asked, as token ids."""

    endpoint: str
    body: ChatRequest | CompletionRequest
    prompts: list[list[int]]
    default_max_tokens: int | None  # None: what the context leaves
    reply: Reply
    tier: Tier


class Completions:
    """Both completion endpoints of one gateway."""

    def __init__(
        self,
        model: ModelCard,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        links: Links,
        metrics: GatewayMetrics,
    ) -> None:
        self._model = model
        self._config = config
        self._tokenizer = tokenizer
        self._names = KeptNames(tokenizer)
        self._links = links
        self._metrics = metrics
        self._request_ids = (f"{links.gateway_id}-{number}" for number in itertools.count())

    async def chat(self, raw: bytes, trace: Trace = UNTRACED) -> Response:
        """POST /v1/chat/completions. Raises PdmuxError."""
        return await self._run("chat", self._chat_job, raw, trace)

    async def complete(self, raw: bytes, trace: Trace = UNTRACED) -> Response:
        """POST /v1/completions. Raises PdmuxError."""
        return await self._run("completions", self._completion_job, raw, trace)

    async def _run(self, endpoint: str, read: Callable[[bytes], Job], raw: bytes, trace: Trace) -> Response:
        arrived_s, job = time.monotonic(), None
        try:
            job = read(raw) if len(raw) <= INLINE_BYTES else await asyncio.to_thread(read, raw)
            link, choice = self._links.choose(job.prompts)
            requests, choices = self._plan(job, link, choice.prefill)
        except BaseException as error:
            self._metrics.ended(endpoint, outcome(error))
            if job is not None and is_miss(error):
                self._metrics.judged(job.tier.name, Verdict.ERROR)
            raise
        self._metrics.routed(choice)
        trace.routed(choice)
        answer = Answer(
            endpoint,
            choices,
            Dispatch(choices, requests, link, self._links, self._metrics, trace),
            arrived_s=arrived_s,
            timeout_s=self._config.request_timeout_s,
            metrics=self._metrics,
            trace=trace,
            tier=job.tier,
        )
        return await self._serve(job, answer)

    async def _serve(self, job: Job, answer: Answer) -> Response:
        """The head of the answer waits for the first token, so that whatever goes wrong before it has a status of its own."""
        body, streams = job.body, False
        try:
            await answer.start()
            updates = await answer.next()
            if not body.stream:
                return Response(await answer.whole(job.reply, updates), media_type="application/json")
            streams = True
        finally:
            if not streams:
                answer.close()
        chunks = answer.chunks(job.reply, updates, body.usage_asked)
        return EventStream(chunks, answer.close, answer.cut_s)

    def _chat_job(self, raw: bytes) -> Job:
        body = self._checked(parse(ChatRequest, raw), 1)
        prompt = self._tokenizer.chat([message.as_template_input() for message in body.messages])
        _check_prompt(prompt, "messages")
        reply = self._reply(ChatReply, "chatcmpl", body)
        return Job(
            "chat", body, [prompt], self._config.default_max_tokens, reply, tier_of(body.service_tier, self._metrics.tiers)
        )

    def _completion_job(self, raw: bytes) -> Job:
        body = parse(CompletionRequest, raw)
        self._checked(body, len(body.prompt))
        prompts = [self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompt]
        for prompt in prompts:
            _check_prompt(prompt, "prompt")
        default = self._config.default_max_tokens or COMPLETION_MAX_TOKENS
        reply = self._reply(CompletionReply, "cmpl", body)
        return Job("completions", body, prompts, default, reply, tier_of(body.service_tier, self._metrics.tiers))

    def _checked(self, body: Any, prompts: int) -> Any:
        if body.model != self._model.name:
            raise UnknownModelError(f"The model {body.model!r} does not exist; this server has {self._model.name!r}.", "model")
        asked = prompts * body.choices_per_prompt
        if asked > self._config.max_prompts:
            raise RequestError(f"{asked} outputs are asked for (prompts times n); at most {self._config.max_prompts} are.", "n")
        return body

    def _reply(self, kind: Any, prefix: str, body: ChatRequest | CompletionRequest) -> Reply:
        reply: Reply = kind(
            f"{prefix}-{uuid.uuid4().hex}",
            self._model.name,
            int(time.time()),
            stream=bool(body.stream),
            usage_asked=body.usage_asked is not UsageAsked.NONE,
            names=self._names,
        )
        return reply

    def _plan(self, job: Job, link: Link, prefill: tuple[str, ...]) -> tuple[list[NewRequest], list[Choice]]:
        """Engine requests and choices, aligned: n of each prompt, in order. All go to one instance, and may get their KV from
        these others."""
        body = job.body
        asked = len(job.prompts) * body.choices_per_prompt
        if asked > link.max_waiting:
            raise RequestError(
                f"{asked} outputs are asked for at once, but this server lets {link.max_waiting} wait (engine.max_waiting); "
                "ask for fewer.",
                "n",
            )
        requests: list[NewRequest] = []
        choices: list[Choice] = []
        for prompt in job.prompts:
            max_tokens = _max_tokens(body.max_tokens_asked, job.default_max_tokens, len(prompt), link.context_length)
            tokens = tuple(prompt)
            for number, params in enumerate(body.sampling(max_tokens, link.vocab_size)):
                requests.append(NewRequest(next(self._request_ids), tokens, params, prefill_peers=prefill))
                text = TextStream(self._tokenizer, tuple(body.stop), params.min_tokens)
                choices.append(Choice(len(choices), text, len(prompt), first_of_prompt=number == 0))
        return requests, choices


def _check_prompt(prompt: list[int], param: str) -> None:
    if not prompt:
        raise RequestError(f"{param}: the text has no tokens.", param=param)


def _max_tokens(asked: int | None, default: int | None, prompt_tokens: int, context_tokens: int) -> int:
    room = context_tokens - prompt_tokens
    if room < 1:
        raise ContextLengthError(prompt_tokens, context_tokens)
    if asked is not None:
        return asked
    return min(default, room) if default is not None else room


def model_list(model: ModelCard, context_length: int | None) -> list[dict[str, Any]]:
    """GET /v1/models"""
    return [
        {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "pdmux-ray",
            "max_model_len": context_length,
        }
    ]
