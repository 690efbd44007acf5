"""Who is refused at an instance's control port, and how: by the name of the error, without effect on others."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("nixl")

from nixl_peer import COMPATIBILITY, SECRET, named, pool_in, transport, until

from kv_transfer.api import Limits, PeerRefused, PeerUp, Received, TransportEvent
from kv_transfer.control import MAX_HELLO_BYTES, Kind
from kv_transfer.layout import KVLayout
from kv_transfer.messages import WIRE_VERSION, Hello, encode
from kv_transfer.nixl import NixlTransport

pytestmark = pytest.mark.cpu

LAYOUT = KVLayout(layers=2, pages=8, kv_heads=2, page_size=4, head_dim=8, dtype_bytes=2)
HELLO = Hello(COMPATIBILITY, SECRET, "stranger", 1, LAYOUT, "elsewhere", 1, b"no agent")
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


def answer_to(end: NixlTransport, sent: bytes) -> tuple[str, bytes]:
    """Why a caller that sends this is refused, and what it is told."""
    host, port = end.address.split(":")
    with socket.create_connection((host, int(port))) as caller:
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
    return frame(Kind.HELLO, encode(Hello(**{name: changes.get(name, getattr(HELLO, name)) for name in HELLO.__slots__})))


NEXT_VERSION = json.dumps(["hello", WIRE_VERSION + 1, *json.loads(encode(HELLO))[2:]]).encode()


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (frame(Kind.HELLO, b"", size=MAX_HELLO_BYTES + 1), "FrameTooLargeError"),
        (b"GET / HTTP/1.1\r\nhost: instance\r\n\r\n", "FrameTooLargeError"),
        (frame(Kind.HELLO, b"\x80\x04pickle"), "MalformedError: not JSON"),
        (frame(Kind.HELLO, encode(HELLO)[:-2]), "MalformedError: not JSON"),
        (frame(Kind.MESSAGE, encode(HELLO)), "MalformedError: a frame of kind 3"),
        (frame(77, b""), "MalformedError: a frame of kind 77"),
        (frame(Kind.HELLO, b'["cancel",3]'), "MalformedError: a Cancel where a Hello belongs"),
        (frame(Kind.HELLO, NEXT_VERSION), f"MalformedError: wire version {WIRE_VERSION + 1}"),
        (hello(secret="guessed"), "IncompatibleError: the other end has another secret"),
        (hello(compatibility="other-model"), "IncompatibleError: compatibility is same-model here and other-model there"),
        (hello(layout=KVLayout(3, 8, 2, 4, 8, 2)), "LayoutMismatchError: layers is 2 here and 3 there"),
        (hello(name="instance"), "IncompatibleError: it is called 'instance', which is my name"),
        (hello(), "MalformedError: a Hello without the place of a pool"),
    ],
)
def test_a_caller_that_cannot_be_a_peer_is_refused_by_a_named_error(ends: Ends, sent: bytes, error: str) -> None:
    why, told = answer_to(ends("instance"), sent)
    assert why.startswith(error)
    assert told == frame(Kind.REFUSED, why.encode())
    assert SECRET.encode() not in told


def test_a_refused_peer_says_so_and_is_not_called_again(ends: Ends) -> None:
    one, other = ends("one"), ends("other", secret="guessed")
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
        good.send("instance", sent)
    received = until_both(instance, good, lambda events: named(events).count("Received") == len(frames))
    assert [event.frame for event in received if isinstance(event, Received)] == frames
    late.connect("instance", instance.address)
    assert any(isinstance(event, PeerUp) for event in until_both(late, instance, lambda events: "PeerUp" in named(events)))


def test_a_frame_beyond_the_limit_closes_the_line_of_its_sender(ends: Ends) -> None:
    one, other = ends("one", limits=Limits(max_frame_bytes=1000)), ends("other")
    other.connect("one", one.address)
    until_both(other, one, lambda events: "PeerUp" in named(events))
    one.poll()
    other.send("one", b"x" * 1000)
    other.send("one", b"x" * 1001)
    assert named(until_both(one, other, lambda events: "PeerDown" in named(events))) == ["Received", "PeerDown"]


@pytest.mark.parametrize("address", ["prefill-0:5600", "10.0.0.1", "10.0.0.1:", "[::1"])
def test_an_address_is_an_ip_address_and_a_port(ends: Ends, address: str) -> None:
    with pytest.raises(ValueError, match="give IP:PORT"):
        ends("instance").connect("peer", address)


def test_only_loopback_is_listened_on_by_default(ends: Ends) -> None:
    assert ends("instance").address.startswith("127.0.0.1:")


def until_both(one: NixlTransport, other: NixlTransport, done: Callable[[list[TransportEvent]], bool]) -> list[TransportEvent]:
    """What happens at `one` until `done` of it, while the other end works as well."""

    def step(events: list[TransportEvent]) -> bool:
        other.poll()
        other.wake()
        one.wake()
        return done(events)

    return until(one, step)
