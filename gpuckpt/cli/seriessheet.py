"""`inspect DIR` for a person: the images of a directory as one table for each series."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from gpuckpt.cli import words
from gpuckpt.cli.sheet import BAD, FAINT, GOOD, UNSURE, Cell, Sheet

WIDE = 120
"""From this many columns on names and programs stand in the table."""
LONGEST_PROGRAM = 28


def series_verdict(data: dict[str, Any]) -> Text:
    """How many images there are, and whether all are whole."""
    images = [image for one in data["series"] for image in one["images"]]
    bad = sum(not image["complete"] for image in images)
    on_disk = data["bytes_on_disk"]
    whole = words.count(len(images), "image") + ("" if on_disk is None else f", {words.size(on_disk)} on disk")
    if bad:
        return Text(f"{whole}; {bad} damaged", BAD)
    verified = all(image["verified"] for image in images)
    return Text(f"{whole}; every byte verified" if verified else f"{whole}, all complete", GOOD)


def add_series(sheet: Sheet, data: dict[str, Any]) -> None:
    """A table for each series, newest image first."""
    wide = sheet.width >= WIDE
    for one in data["series"]:
        images = one["images"]
        sheet.heading(one["name"] or "Other images", _summary(images))
        if wide:
            columns = "IMAGE MADE >GEN >MEMORY >STORED >ADDS >COPIES PROGRAM STATE"
            sheet.table(columns, [_wide(image) for image in images])
        else:
            columns = "IMAGE >GEN >MEMORY >STORED >ADDS >COPIES STATE"
            sheet.table(columns, [_narrow(image, one["name"]) for image in images])
    if not wide and any(one["name"] for one in data["series"]):
        sheet.line(Text("IMAGE is the end of NAME-TIME; ADDS: on disk, shared with no other", FAINT))
    if data["bytes_on_disk"] is None:
        sheet.line(Text("ADDS and COPIES: not known, for over SFTP nobody sees which files are the same", FAINT))
    if data.get("left_out"):
        sheet.line(Text(f"and {data['left_out']} more that were not looked at: there are too many", UNSURE))
    _add_damaged(sheet, data)


def _add_damaged(sheet: Sheet, data: dict[str, Any]) -> None:
    """Why images are damaged: also of those that the tables leave out."""
    bad = [image for one in data["series"] for image in one["images"] if not image["complete"]]
    if bad:
        sheet.heading("Damaged", words.count(len(bad), "image"))
        sheet.table("IMAGE WHY", [(image["name"], Text(words.safe(image["damage"]), BAD)) for image in bad])


def _summary(images: list[dict[str, Any]]) -> str:
    programs = dict.fromkeys(image["program"] for image in images if image["program"])
    of = f" of {words.shorten(next(iter(programs)), 40)}" if len(programs) == 1 else ""
    return f"{words.count(len(images), 'image')}{of}"


def _narrow(image: dict[str, Any], series: str) -> list[Cell]:
    name = image["name"].removeprefix(f"{series}-") if series else image["name"]
    return [name, *_numbers(image), _state(image)]


def _wide(image: dict[str, Any]) -> list[Cell]:
    made = words.moment(image["created"]).removesuffix(" UTC") if image["created"] is not None else "?"
    program = words.shorten(words.safe(image["program"] or "?"), LONGEST_PROGRAM)
    return [image["name"], made, *_numbers(image), program, _state(image)]


def _numbers(image: dict[str, Any]) -> list[Cell]:
    generation, copies = image["generation"], image["copies"]
    return [
        "?" if generation is None else str(generation),
        words.size(image["bytes_raw"]),
        words.size(image["bytes_stored"]),
        words.size(image["bytes_unshared"]),
        str(copies) if copies is not None else "?" if image["complete"] else "-",
    ]


def _state(image: dict[str, Any]) -> Text:
    if not image["complete"]:
        return Text("damaged", BAD)
    parts = ["verified" if image["verified"] else "complete", "latest" if image["latest"] else ""]
    parts += [f"copy at {words.safe(copy.get('host'))}" for copy in image["protected"] or ()]
    return Text(", ".join(part for part in parts if part), GOOD if image["verified"] else "")
