"""Who is refused at an instance's control port, and how: by the name of the error, without effect on others."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("nixl")

from nixl_peer import COMPATIBILITY, SECRET, epoch_of, named, pool_in, transport, until

from kv_transfer.api import Limits, PeerRefused, PeerUp, Received, TransportEvent
from kv_transfer.control import MAX_HELLO_BYTES
from kv_transfer.greeting import NONCE_BYTES, PROOF_BYTES, Greeting, GreetingError
from kv_transfer.layout import KVLayout
from kv_transfer.line import Kind
from kv_transfer.messages import WIRE_VERSION, Hello, encode
from kv_transfer.nixl import NixlTransport

pytestmark = pytest.mark.cpu

LAYOUT = KVLayout(layers=2, pages=8, kv_heads=2, page_size=4, head_dim=8, dtype_bytes=2)
HELLO = Hello(COMPATIBILITY, "stranger", 1, 1, LAYOUT, "elsewhere", 1, b"no agent")
Ends = Callable[..., NixlTransport]


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    made: list[NixlTransport] = []

    def make(name: str, layout: KVLayout = LAYOUT, **options: object) -> NixlTransport:
        made.append(transport(name, layout, pool_in(tmp_path / name, layout), **options))
        return made[-1]

    yield make
    for end in made:
        end.close()


def frame(kind: int, body: bytes, size: int | None = None) -> bytes:
    return (len(body) if size is None else size).to_bytes(4, "big") + bytes((kind,)) + body


class Caller:
    """A line to an instance, by hand."""

    def __init__(self, end: NixlTransport, secret: str = SECRET) -> None:
        host, port = end.address.split(":")
        self.end = end
        self.sock = socket.create_connection((host, int(port)))
        self.greeting = Greeting(secret, called=False)

    def agree(self) -> None:
        """Nonces each way, whatever the answer proves."""
        self.sock.sendall(frame(Kind.NONCE, self.greeting.call()))
        self.sock.setblocking(False)
        answer = b""
        while len(answer) < 5 + NONCE_BYTES + PROOF_BYTES:
            assert self.end.poll() == []
            self.end.wait(0.01)
            with contextlib.suppress(BlockingIOError):
                answer += self.sock.recv(4096)
        self.sock.setblocking(True)
        with contextlib.suppress(GreetingError):
            self.greeting.take_answer(answer[5:])

    def say(self, hello: bytes) -> None:
        self.sock.sendall(frame(Kind.HELLO, self.greeting.seal(hello)))


def answer_to(end: NixlTransport, sent: bytes, hello: bytes = b"", secret: str = SECRET) -> tuple[str, bytes]:
    """Why a caller that sends this, or after nonces this hello, is refused, and what it is told."""
    line = Caller(end, secret)
    with line.sock as caller:
        if hello:
            line.agree()
            line.say(hello)
        caller.sendall(sent)
        (event,) = until(end, bool, 5)
        assert isinstance(event, PeerRefused)
        assert event.peer in ("a caller from 127.0.0.1", "stranger")  # the latter when it has the secret
        caller.settimeout(5)
        told = b""
        while data := caller.recv(4096):
            told += data
    return event.why, told


def hello(**changes: object) -> bytes:
    return encode(replace(HELLO, **changes))


NEXT_VERSION = json.dumps(["hello", WIRE_VERSION + 1, *json.loads(encode(HELLO))[2:]]).encode()


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (frame(Kind.HELLO, b"", size=MAX_HELLO_BYTES + 1), "FrameTooLargeError"),
        (b"GET / HTTP/1.1\r\nhost: instance\r\n\r\n", "FrameTooLargeError"),
        (frame(Kind.HELLO, b"\x80\x04pickle"), "GreetingError: a hello before the nonces"),
        (frame(Kind.HELLO, encode(HELLO)), "GreetingError: a hello before the nonces"),
        (frame(Kind.MESSAGE, encode(HELLO)), "MalformedError: a frame of kind 3"),
        (frame(77, b""), "MalformedError: a frame of kind 77"),
        (frame(Kind.NONCE, b"short"), "GreetingError: what begins a line is one nonce"),
    ],
)
def test_a_caller_that_does_not_know_how_to_begin_is_refused_by_a_named_error(ends: Ends, sent: bytes, error: str) -> None:
    why, told = answer_to(ends("instance"), sent)
    assert why.startswith(error)
    assert told == frame(Kind.REFUSED, why.encode())


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (encode(HELLO)[:-2], "MalformedError: not JSON"),
        (b'["cancel",3]', "MalformedError: a Cancel where a Hello belongs"),
        (NEXT_VERSION, f"MalformedError: wire version {WIRE_VERSION + 1}"),
        (hello(compatibility="other-model"), "IncompatibleError: compatibility is same-model here and other-model there"),
        (hello(layout=KVLayout(3, 8, 2, 4, 8, 2)), "LayoutMismatchError: layers is 2 here and 3 there"),
        (hello(name="instance"), "IncompatibleError: it is called 'instance', which is my name"),
        (hello(), "MalformedError: a Hello without the place of a pool"),
    ],
)
def test_a_caller_that_cannot_be_a_peer_is_refused_by_a_named_error(ends: Ends, sent: bytes, error: str) -> None:
    why, told = answer_to(ends("instance"), b"", hello=sent)
    assert why.startswith(error)
    assert told == frame(Kind.REFUSED, why.encode())


def test_a_caller_without_the_secret_is_refused_and_learns_nothing(ends: Ends) -> None:
    why, told = answer_to(ends("instance"), b"", hello=encode(HELLO), secret="guessed")
    assert why.startswith("GreetingError: the other end has another secret")
    assert SECRET.encode() not in told


def test_whoever_answers_at_an_address_that_is_called_learns_neither_the_secret_nor_who_calls(ends: Ends) -> None:
    one = ends("one")
    with socket.create_server(("127.0.0.1", 0)) as trap:
        one.connect("prefill", f"127.0.0.1:{trap.getsockname()[1]}")
        one.poll()
        caught, _ = trap.accept()
        with caught:
            until_idle(one)
            heard = caught.recv(2**20)
            assert heard == frame(Kind.NONCE, heard[5 : 5 + NONCE_BYTES])
            caught.sendall(frame(Kind.NONCE, bytes(NONCE_BYTES + PROOF_BYTES)))
            (event,) = until(one, bool, 5)
            assert isinstance(event, PeerRefused)
            assert event.why.startswith("GreetingError")
            assert caught.recv(2**20) == b""


def test_a_hello_that_comes_after_a_later_one_ends_its_own_line_only(ends: Ends) -> None:
    instance, peer = ends("instance"), ends("peer")
    late = Caller(instance)
    with late.sock:
        late.agree()
        peer.connect("instance", instance.address)
        (up,) = [e for e in until_both(instance, peer, lambda events: "PeerUp" in named(events)) if isinstance(e, PeerUp)]
        late.say(hello(name="peer", epoch=up.epoch, number=1))
        until_idle(instance)
        assert late.sock.recv(4096) == b""
    instance.send("peer", up.epoch, b"still there")


def test_a_refused_peer_says_so_and_is_not_called_again(ends: Ends) -> None:
    one, other = ends("one"), ends("other", compatibility="other-model")
    one.connect("other", other.address)
    events = until_both(one, other, lambda events: "PeerRefused" in named(events))
    assert [(event.peer, event.why.partition(":")[0]) for event in events if isinstance(event, PeerRefused)] == [
        ("other", "RefusedError")
    ]
    assert until_both(one, other, lambda events: True) == []


def test_an_instance_that_answers_under_another_name_is_not_the_one_called(ends: Ends) -> None:
    one, other = ends("one"), ends("other")
    one.connect("third", other.address)
    (event,) = until_both(one, other, lambda events: "PeerRefused" in named(events))
    assert isinstance(event, PeerRefused)
    assert event.why.startswith("IncompatibleError: it is called 'other', which is not who was called")


def test_garbage_ends_one_line_and_no_other(ends: Ends) -> None:
    instance, good, late = ends("instance"), ends("good"), ends("late")
    good.connect("instance", instance.address)
    until_both(good, instance, lambda events: "PeerUp" in named(events))
    instance.poll()
    answer_to(instance, b"\0" * 5)
    frames = [bytes([number]) * 2**number for number in range(18)]
    for sent in frames:
        good.send("instance", epoch_of(good, "instance"), sent)
    received = until_both(instance, good, lambda events: named(events).count("Received") == len(frames))
    assert [event.frame for event in received if isinstance(event, Received)] == frames
    late.connect("instance", instance.address)
    assert any(isinstance(event, PeerUp) for event in until_both(late, instance, lambda events: "PeerUp" in named(events)))


def test_a_frame_beyond_the_limit_closes_the_line_of_its_sender(ends: Ends) -> None:
    one, other = ends("one", limits=Limits(max_frame_bytes=1000)), ends("other")
    other.connect("one", one.address)
    until_both(other, one, lambda events: "PeerUp" in named(events))
    one.poll()
    for size in (1000, 1001):
        other.send("one", epoch_of(other, "one"), b"x" * size)
    assert named(until_both(one, other, lambda events: "PeerDown" in named(events)))[-2:] == ["Received", "PeerDown"]


def test_without_files_for_callers_an_instance_waits_for_some_instead_of_turning_in_circles(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, late = ends("instance"), ends("late")
    accepted: list[int] = []

    class Exhausted:
        def __init__(self, server: socket.socket) -> None:
            self.fileno, self.close, self.getsockname = server.fileno, server.close, server.getsockname

        def accept(self) -> tuple[socket.socket, object]:
            accepted.append(1)
            raise OSError(errno.EMFILE, "too many open files")

    late.connect("instance", instance.address)
    with monkeypatch.context() as patch:
        patch.setattr(instance._lines, "_server", Exhausted(instance._lines._server))
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            late.poll()
            instance.poll()
            instance.wait(0.02)
    assert len(accepted) == 1
    assert any(isinstance(event, PeerUp) for event in until_both(late, instance, lambda events: "PeerUp" in named(events)))


def test_a_call_that_cannot_even_begin_is_tried_again_and_costs_no_agent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ends("one"), ends("other")
    greeted: list[object] = []
    greet = one.greet
    monkeypatch.setattr(one, "greet", lambda line: (greeted.append(line), greet(line))[1])
    make = socket.socket

    def fails(family: int = -1) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    class Unreachable(make):
        def connect_ex(self, address: object) -> int:
            return errno.ENETUNREACH

    one.connect("other", other.address)
    for kind in (fails, Unreachable):
        with monkeypatch.context() as patch:
            patch.setattr("kv_transfer.control.socket.socket", kind)
            until_idle(one)
    assert greeted == []
    until_both(one, other, lambda events: "PeerUp" in named(events))


def test_a_peer_that_is_called_again_while_a_call_is_under_way_has_one_connection(ends: Ends) -> None:
    one, other = ends("one"), ends("other")
    one.connect("other", other.address)
    one.poll()
    one.connect("other", other.address)
    events = until_both(one, other, lambda events: "PeerUp" in named(events))
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        events += one.poll()
        other.poll()
        one.wait(0.01)
    assert named(events) == ["PeerUp"]


@pytest.mark.parametrize("address", ["10.0.0.1:0", "10.0.0.1:65536", "prefill-0:5600", "10.0.0.1", "10.0.0.1:", "[::1"])
def test_an_address_is_an_ip_address_and_a_port(ends: Ends, address: str) -> None:
    with pytest.raises(ValueError, match="give IP:PORT"):
        ends("instance").connect("peer", address)


def test_only_loopback_is_listened_on_by_default(ends: Ends) -> None:
    assert ends("instance").address.startswith("127.0.0.1:")


def until_idle(end: NixlTransport, seconds: float = 0.2) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert end.poll() == []
        end.wait(0.02)


def until_both(one: NixlTransport, other: NixlTransport, done: Callable[[list[TransportEvent]], bool]) -> list[TransportEvent]:
    """What happens at `one` until `done` of it, while the other end works as well."""

    def step(events: list[TransportEvent]) -> bool:
        other.poll()
        other.wake()
        one.wake()
        return done(events)

    return until(one, step)
