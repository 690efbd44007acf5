"""Events out of the pieces of a `text/event-stream`, whatever way the network cut them. Knows nothing of what they carry."""

from __future__ import annotations

LIMIT_BYTES = 1 << 20  # of one event


class OversizeError(Exception):
    """An event is longer than `LIMIT_BYTES`: this is no stream of tokens."""


class EventParser:
    """Takes the bytes as they come, returns the `data` of every event that is complete.

    As https://html.spec.whatwg.org/multipage/server-sent-events.html has it: lines end with CR, LF or both; a line that begins
    with a colon is a comment; several `data` lines are one text; an empty line ends the event. Other fields do not matter here.
    """

    __slots__ = ("_data", "_rest", "_size")

    def __init__(self) -> None:
        self._rest = b""  # of a line whose end has not come
        self._data: list[bytes] = []  # of an event whose end has not come
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Raises OversizeError."""
        text = self._rest + piece if self._rest else piece
        end = max(text.rfind(b"\n"), text.rfind(b"\r", 0, -1)) + 1  # a CR at the very end may be half of a CRLF
        self._rest = text[end:]
        events: list[bytes] = []
        for line in text[:end].splitlines():
            if not line:
                self._finish(events)
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                self._size += len(line)
        if self._size + len(self._rest) > LIMIT_BYTES:
            raise OversizeError(f"an event of more than {LIMIT_BYTES} bytes")
        return events

    def end(self) -> list[bytes]:
        """What the end of the stream completes. (The standard would drop it; servers that forget the last line end exist.)"""
        events = self.feed(b"\n\n")
        self._finish(events)
        return events

    def _finish(self, events: list[bytes]) -> None:
        if self._data:
            events.append(b"\n".join(self._data))
            self._data, self._size = [], 0
