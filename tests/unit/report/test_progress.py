from __future__ import annotations

import io

from rich.console import Console

from pdmux_ray.report.progress import Progress


def lines(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


class Clock:
    """Seconds that the test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_without_a_terminal_there_is_a_line_now_and_then_and_one_at_the_end() -> None:
    console, clock = Console(file=io.StringIO(), width=40), Clock()
    with Progress(100, console, clock) as progress:
        for second in range(1, 21):
            clock.now_s = 100.0 + second
            progress.update(second * 5, f"rate 4: {second} sent")
    assert lines(console) == [
        "25 %, about 15 s left, rate 4: 5 sent",
        "50 %, about 10 s left, rate 4: 10 sent",
        "75 %, about 5 s left, rate 4: 15 sent",
        "100 %, done after 20 s, rate 4: 20 sent",
    ]


def test_long_waits_are_told_in_minutes_and_hours() -> None:
    console, clock = Console(file=io.StringIO()), Clock()
    with Progress(1000, console, clock) as progress:
        for done, now_s in ((1, 110.0), (100, 400.0)):
            clock.now_s = now_s
            progress.update(done)
    assert lines(console) == ["0 %, about 2:46 h left", "10 %, about 45:00 min left"]


def test_nothing_is_foretold_before_anything_is_done() -> None:
    console, clock = Console(file=io.StringIO()), Clock()
    progress = Progress(10, console, clock)
    clock.now_s += 6
    progress.update(0, "connecting")
    assert lines(console) == ["0 %, connecting"]


def test_a_terminal_gets_one_live_line_and_nothing_is_left_of_it() -> None:
    console, clock = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None), Clock()
    with Progress(10, console, clock) as progress:
        clock.now_s += 1
        progress.update(5, "[red]half\x1b[2J")
    text = "\n".join(lines(console))
    assert "about 1 s left" in text
    assert "[red]half\\x1b[2J" in text


def test_an_update_is_drawn_only_now_and_then() -> None:
    console, clock = Console(file=io.StringIO(), width=100, force_terminal=True), Clock()
    with Progress(1000, console, clock) as progress:
        before = len("".join(lines(console)))
        for done in range(1, 100):
            progress.update(done)
        assert len("".join(lines(console))) == before
