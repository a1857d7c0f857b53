"""Rate and remaining time, and the line a minute of a transfer that nobody watches."""

from gpuckpt.cli.speed import MinuteLines, Speed
from gpuckpt.model.report import Event

MIB = 1 << 20


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def progress(done, phase="transfer"):
    return Event(phase, "progress", done_bytes=done * MIB, total_bytes=100 * MIB)


def test_what_was_there_before_is_not_fast():
    clock = Clock()
    speed = Speed(clock)
    assert speed.words(progress(40)) == "40.0 MiB of 100 MiB"
    clock.now += 10
    assert speed.words(progress(60)) == "60.0 MiB of 100 MiB, 2.0 MiB/s, 20.0 s left"
    assert speed.words(Event("transfer", "progress", done_bytes=60 * MIB)) == "60.0 MiB, 2.0 MiB/s"


def test_other_phases_show_their_amount_alone():
    clock = Clock()
    speed = Speed(clock)
    speed.words(progress(1, "verify"))
    clock.now += 10
    assert speed.words(progress(9, "verify")) == "9.0 MiB of 100 MiB"


def test_one_line_a_minute():
    clock, lines = Clock(), []
    minutes = MinuteLines(lines.append, clock)
    for second in range(181):
        clock.now = 100.0 + second
        minutes.show(progress(second / 2))
        minutes.show(Event("verify", "begin"))
    assert [line.split(",")[0] for line in lines] == [
        f"gpuckpt: transfer: {mib}.0 MiB of 100 MiB" for mib in (30, 60, 90)
    ]
