"""A text layer whose token 97 is "a", as far as the serving code needs one."""

from __future__ import annotations

from pdmux_ray.metrics.gateway_metrics import GatewayMetrics


class Letters:
    """Names of tokens: a token is a character's code."""

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class LetterText:
    """Shows each character at once, until "!" stops it; holds "?" back."""

    def __init__(self) -> None:
        self.stopped = False
        self.chars = 0
        self._held = ""

    def push(self, token_id: int) -> str:
        self.chars += 1
        text = self._held + chr(token_id)
        self._held = ""
        if text.endswith("!"):
            self.stopped = True
            return text[:-1]
        if text.endswith("?"):
            self._held = "?"
            return text[:-1]
        return text

    def finish(self) -> str:
        return self._held


def metrics() -> GatewayMetrics:
    return GatewayMetrics("gateway", dict, dict)
