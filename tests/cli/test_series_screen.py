"""`inspect DIR`: one calm screen, at every width; what is damaged is never hidden."""

import pytest

from gpuckpt.cli.manner import Manner
from gpuckpt.cli.render import present
from gpuckpt.model.report import Report


def image(number: int, **changes) -> dict:
    name = f"llm-20261130T1{number:05d}Z"
    return {
        "name": name, "path": f"/srv/{name}", "image_id": "ab", "created": 1_796_000_000.0 + number, "complete": True,
        "damage": None, "verified": None, "latest": False, "generation": 1, "bytes_raw": 20 << 30, "bytes_stored": 9 << 30,
        "bytes_on_disk": 9 << 30, "bytes_unshared": 3 << 20, "copies": 1, "program": "python3 serve.py", "root_pid": 7,
        "host": "gpu07", "protected": [], **changes,
    }  # fmt: skip


DAMAGED = {"complete": False, "damage": "part packs/index is missing", "copies": None, "verified": False}
UNKNOWN = {"created": None, "generation": None, "bytes_raw": None, "bytes_stored": None, "program": None, "host": None}


def series(*images: dict, name: str = "llm", more=()) -> Report:
    data = {"kind": "series", "path": "/srv", "latest": None, "bytes_on_disk": 27 << 30}
    found = [{"name": name, "images": list(images)}, *more]
    return Report("inspect", "ok", "untouched", {**data, "series": found})


@pytest.fixture(params=[80, 100, 200])
def width(request, monkeypatch):
    monkeypatch.setattr("gpuckpt.cli.sheet.columns_of", lambda _stream: request.param)
    monkeypatch.setattr("gpuckpt.cli.canvas.columns_of", lambda _stream: request.param)
    return request.param


def screen(report, capsys, **manner) -> str:
    assert present(report, Manner(**manner)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_every_fact_is_there(capsys, width):
    copy = {"host": "spare", "path": "/x", "time": 0.0, "verified": "BLAKE3"}
    report = series(image(3, latest=True), image(2, copies=4, protected=[copy]), image(1))
    out = screen(report, capsys)
    for fact in (
        "/srv", "3 images, 27.0 GiB on disk, all complete", "llm", "python3 serve.py", "20261130T100003Z", "20.0 GiB",
        "9.0 GiB", "3.0 MiB", "complete, latest", "complete, copy at", "spare", "4",
    ):  # fmt: skip
        assert fact in out, fact
    assert all(len(line) <= width for line in out.splitlines()), out


def test_what_nobody_sees_over_sftp_is_said(capsys, width):
    unseen = {"bytes_on_disk": None, "bytes_unshared": None, "copies": None}
    report = series(image(2, latest=True, **unseen), image(1, **unseen))
    report.data.update(bytes_on_disk=None, left_out=7)
    out = screen(report, capsys)
    for fact in (
        "2 images, all complete",
        "ADDS and COPIES: not known",
        "complete, latest",
        "and 7 more that were not",
    ):
        assert fact in out, fact
    assert all(len(line) <= width for line in out.splitlines()), out


def test_a_damaged_image_is_shown_behind_a_hundred_others(capsys, width):
    images = [image(number) for number in reversed(range(1, 100))]
    out = screen(series(*images, image(0, **DAMAGED, **UNKNOWN)), capsys)
    assert "1 damaged" in out
    assert "llm-20261130T100000Z" in out
    assert "part packs/index is missing" in out
    assert "and 90 more" in out
    assert len(out.splitlines()) < 24
    assert all(len(line) <= width for line in out.splitlines())


def test_verified_is_said(capsys):
    out = screen(series(image(1, verified=True)), capsys)
    assert "every byte verified" in out
    out = screen(series(image(2, verified=True), image(1, **DAMAGED)), capsys)
    assert "1 damaged" in out
    assert "every byte verified" not in out


def test_others_stand_apart(capsys, width):
    other = {"name": "", "images": [image(1, name="by-hand"), image(2, name="more")]}
    out = screen(series(image(3), more=[other]), capsys)
    assert "Other images  2 images" in out
    assert "by-hand" in out


def test_hostile_words_do_not_steer_the_terminal(capsys, width):
    evil = image(1, program="a\x1b[2Jb\nc", damage="x\x1b]0;y\x07", complete=False, name="llm-20261130T100001Z")
    out = screen(series(evil), capsys)
    assert "\x1b" not in out
    assert "\x07" not in out
