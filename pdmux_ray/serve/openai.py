"""The bodies of OpenAI's completion endpoints as they come in. Knows nothing of HTTP, ray or the engine.

Nothing is silent. A field is one of four kinds: supported (it is in the model below, with its range), inert (it asks for
nothing that would change the answer and is dropped: `INERT`), unsupported (refused unless it has the value that switches it
off: `UNSUPPORTED`), or unknown (refused by name, as OpenAI does). `null` always means "not given".

Text is tokenized as it stands: what is spelled like a special token (`<|im_end|>`) becomes one, also within a chat message.
Whoever passes on text of others' that must not end a message strips it first.

The log probabilities of an answer are those of all its tokens with text, also of the ones that a stop string, which is never
shown, was made of.
"""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pdmux_ray.errors import RequestError
from pdmux_ray.serve.generation import UsageAsked
from pdmux_ray.types import MAX_LOGPROBS, SamplingParams

INERT = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})

# Field -> the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
}

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_MESSAGES = 4096

# Every list of a body fails fast: a library that notes each wrong item of a long one takes seconds and gigabytes.

# Kind of a validation error -> words for it, where the library's own are about its classes.
_WORDS = {"model_type": "must be a JSON object", "model_attributes_type": "must be a JSON object"}

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))  # a body's field of the same name is passed on


class StreamOptions(BaseModel):
    """`include_obfuscation` pads OpenAI's own chunks against traffic analysis; here there is nothing to switch off.

    `continuous_usage_stats` is beyond OpenAI, under the name vLLM gave it, and needs `include_usage`: every chunk has a `usage`
    with the `prompt_tokens`, `completion_tokens` and `total_tokens` of its choice so far. A token that has no text of its own
    yet sends no chunk; the next chunk counts it.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > 8:  # each unknown one would be an error of its own
            raise ValueError(f"has {len(value)} fields, and knows {', '.join(cls.model_fields)} only")
        return value

    @model_validator(mode="after")
    def _continuous_needs_usage(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage to be true")
        return self


class _Body(BaseModel):
    """What both endpoints share. Sampling ranges are `SamplingParams`' own."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[list[str], Field(fail_fast=True)] = []
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    service_tier: str | None = None  # which SLO it is judged by (`metrics.tiers`)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Beyond OpenAI, under the names vLLM gave them.
    top_k: int | None = None  # -1 and 0: off
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_is_a_list(cls, value: Any) -> Any:
        strings = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
            raise ValueError("must be a non-empty string or a list of them")
        if len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"takes at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
        return strings

    @field_validator("stop_token_ids")
    @classmethod
    def _token_ids_are_not_negative(cls, value: list[int] | None) -> list[int] | None:
        if value and min(value) < 0:
            raise ValueError("must not be negative")
        return value and list(dict.fromkeys(value))

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def usage_asked(self) -> UsageAsked:
        options = self.stream_options
        if options is None or not options.include_usage:
            return UsageAsked.NONE
        return UsageAsked.ALL if options.continuous_usage_stats else UsageAsked.LAST

    @property
    def top_logprobs_asked(self) -> int | None:
        """None: no logprobs at all; otherwise how many alternatives beside the chosen token."""
        raise NotImplementedError

    @property
    def max_tokens_asked(self) -> int | None:
        return self.max_tokens

    def sampling(self, max_tokens: int, vocab_size: int) -> list[SamplingParams]:
        """Of the n choices of a prompt, which differ in their seed alone. Raises RequestError."""
        seed = self.seed if self.seed is not None else random.getrandbits(62)
        if self.stop_token_ids and max(self.stop_token_ids) >= vocab_size:
            raise RequestError(f"stop_token_ids must be below the vocabulary size, {vocab_size}.", param="stop_token_ids")
        given = {
            name: value for name in _SAMPLING & type(self).model_fields.keys() if (value := getattr(self, name)) is not None
        }
        translated = {
            "max_tokens": max_tokens,
            "top_k": 0 if self.top_k in (None, -1) else self.top_k,
            "seed": seed,
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "logprobs": self.top_logprobs_asked,
        }
        first = SamplingParams(**given | translated)
        return [first, *(replace(first, seed=(seed + choice) % 2**63) for choice in range(1, self.choices_per_prompt))]


class ChatMessage(BaseModel):
    """A message of text. `content` as a list of parts is joined; every other kind of part is refused."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _content_is_text(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return "" if value is None else value
        for number, part in enumerate(value):
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise ValueError(f'part {number} is not {{"type": "text", "text": ...}}; only text is supported')
        return "".join(part["text"] for part in value)

    def model_post_init(self, context: Any) -> None:
        for key, value in (self.model_extra or {}).items():
            if value not in (None, [], ""):  # clients send answers back whole, with their empty fields
                raise ValueError(f"the field {key!r} of a message is not supported")

    def as_template_input(self) -> dict[str, str]:
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message | ({"name": self.name} if self.name else {})


class ChatRequest(_Body):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def top_logprobs_asked(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
            return None
        return self.top_logprobs or 0

    @property
    def max_tokens_asked(self) -> int | None:
        new, old = self.max_completion_tokens, self.max_tokens
        if new is not None and old is not None and new != old:
            raise RequestError("max_tokens and max_completion_tokens contradict each other.", param="max_completion_tokens")
        return new if new is not None else old


class CompletionRequest(_Body):
    """POST /v1/completions"""

    # As sent: a string, a list of strings, token ids, or a list of token ids.
    prompt: Annotated[list[str | Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt_is_a_list_of_prompts(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
            value = [value]
        if not isinstance(value, list) or not all(_is_text(p) or _is_token_ids(p) for p in value):
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
        if not value or not all(value):
            raise ValueError("must not be empty")
        return value

    @property
    def top_logprobs_asked(self) -> int | None:
        return self.logprobs


Request = TypeVar("Request", ChatRequest, CompletionRequest)


def parse(kind: type[Request], raw: bytes) -> Request:
    """Reads a body. Raises RequestError that names the field."""
    body = _read_json(raw)
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.")
    try:
        return kind.model_validate(_screen(kind, body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = _path(first["loc"])
        message = _WORDS.get(first["type"], first["msg"].removeprefix("Value error, "))
        raise RequestError(f"{param}: {message}" if param else message, param=param or None) from None


def _read_json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        why = str(error)
    except UnicodeDecodeError as error:
        why = f"the byte at position {error.start} is not part of a character; send UTF-8"
    except RecursionError:
        why = "it is nested too deeply"
    except ValueError:  # the interpreter's limit
        why = "a number has too many digits"
    raise RequestError(f"The body is not valid JSON: {why}")


def _screen(kind: type[Request], body: dict[str, Any]) -> dict[str, Any]:
    """Drops inert fields; refuses unsupported and unknown ones."""
    kept = {}
    for name, value in body.items():
        if name in kind.model_fields:
            kept[name] = value
        elif name in UNSUPPORTED:
            if value is not None and not any(type(value) is type(off) and value == off for off in UNSUPPORTED[name]):
                raise RequestError(f"{name} is not supported by this server; leave it out.", param=name)
        elif name not in INERT:
            raise RequestError(f"Unrecognized request argument: {name}", param=name)
    return kept


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)
