"""The errors that more than one part of the project knows. Each message says what is wrong and what to do.

Where only one part raises and catches a finer one, it derives it there (`serve/problems.py`, `device/cpu/native.py`).

PdmuxError
├── ConfigError               a config file or argument is wrong; nothing was started
│   ├── UnsupportedModelError the model needs something this project does not implement
│   └── CudaUnavailableError  this machine cannot run the CUDA device
├── WeightsError              weights are missing, left over, or of the wrong shape
├── RequestError              the request is wrong; its client is told (HTTP 4xx)
│   ├── ContextLengthError    prompt longer than the context
│   └── QueueFullError        try again later (HTTP 429)
├── InstanceUnavailableError  no instance can take the request now (HTTP 503)
├── DeadlineError             a request ran past its deadline (HTTP 504)
└── IntegrityError            an invariant is broken: a bug; carries the history that led there
    └── IllegalMoveError      a phase change that the table does not allow
"""

from __future__ import annotations


class PdmuxError(Exception):
    """Base of all."""


class ConfigError(PdmuxError):
    """A config file or an argument is wrong; nothing was started."""


class UnsupportedModelError(ConfigError):
    """The model needs something that is not implemented; the message lists what is."""


class CudaUnavailableError(ConfigError):
    """This machine cannot run the CUDA device: `missing` says what it lacks, and the message what runs instead."""

    def __init__(self, missing: str) -> None:
        super().__init__(f"{missing} configs/cpu-mux.yaml (engine.device: cpu) needs no GPU.")


class WeightsError(PdmuxError):
    """Weights are missing, left over, or have the wrong shape; the message names them."""


class RequestError(PdmuxError):
    """The request is wrong. `param` names the offending field of the request body, where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt does not fit the context; the message states both numbers."""

    def __init__(self, prompt_tokens: int, context_length: int) -> None:
        super().__init__(
            f"This model's maximum context length is {context_length} tokens, but the prompt has {prompt_tokens} tokens. "
            f"Shorten the prompt to at most {context_length - 1} tokens.",
            param="prompt",
        )


class QueueFullError(RequestError):
    """The waiting queue is full, or so long that the first token would come too late. `retry_after_s` is what the client should
    wait."""

    def __init__(self, waiting: int, retry_after_s: float, first_token_s: float | None = None) -> None:
        """`first_token_s`: in how long it is predicted, when that is too late."""
        full = f"full ({waiting} requests are waiting)"
        late = f"too long ({waiting} requests are waiting): the first token would come in {first_token_s or 0:.1f} s"
        super().__init__(f"The queue is {full if first_token_s is None else late}. Try again in {retry_after_s:.0f} s.")
        self.retry_after_s = retry_after_s


class InstanceUnavailableError(PdmuxError):
    """No instance can take the request now."""


class DeadlineError(PdmuxError):
    """A request ran past its deadline."""


class IntegrityError(PdmuxError):
    """An invariant is broken. Always a bug in this project; please report it with the message."""


class IllegalMoveError(IntegrityError):
    """A phase change that `types.LEGAL_MOVES` does not allow; the message carries the request's history."""
