"""What another host may ask to be pruned here, and what it may answer: both are taken for hostile."""

from __future__ import annotations

import json
import os

import pytest

from gpuckpt.flows import farseries, serving
from gpuckpt.model.errors import NotFound, Refused
from gpuckpt.model.jsonform import FormError
from gpuckpt.model.series import member_name
from tests.small_images import make_image

NOW = 1_796_000_000


@pytest.fixture
def images(tmp_path):
    tmp_path.chmod(0o700)
    return [make_image(tmp_path / member_name("job", NOW + number), 0.05, seed=number, packs=1) for number in range(3)]


def ask(path, **changes) -> dict:
    question = {"path": str(path), "name": "job", "rules": {"keep": 1}, **changes}
    return json.loads(serving._series(question, memoryview(b""))[1])


def test_the_link_is_set_and_older_ones_go(images):
    said = ask(images[2])
    assert said["removed"] == [images[0].name, images[1].name]
    assert sorted(path.name for path in images[0].parent.iterdir()) == [".job.lock", images[2].name, "latest"]
    assert os.readlink(images[0].parent / "latest") == images[2].name


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"name": "../x"},
        {"name": ""},
        {"path": "relative/job-20261130T005320Z"},
        {"path": "/srv/plain"},
        {"rules": {"keep": 0}},
        {"rules": {"keep": -1}},
        {"rules": {"keep": "1"}},
        {"rules": None},
        {"rules": []},
    ],
)
def test_a_question_without_a_sensible_form_removes_nothing(images, changes):
    with pytest.raises((ValueError, TypeError, KeyError)):
        ask(images[2], **changes)
    assert all(image.exists() for image in images)


def test_an_image_that_is_not_there_removes_nothing(images):
    """Nor does one that is damaged: neither becomes the newest."""
    said = ask(images[0].with_name(member_name("job", NOW + 9)))
    assert (said["removed"], [one["id"] for one in said["findings"]]) == ([], ["series-prune"])
    (images[2] / "packs" / "index").unlink()
    assert ask(images[2])["removed"] == []
    assert not (images[0].parent / "latest").is_symlink()


def test_a_place_that_is_not_there_or_not_free(images):
    with pytest.raises(NotFound):
        ask("/nowhere/job-20261130T005320Z")
    (images[0].parent / "latest").mkdir()
    with pytest.raises(Refused):
        ask(images[2])


@pytest.mark.parametrize(
    "said",
    [
        {},
        [],
        {"removed": 1, "notes": [], "findings": []},
        {"removed": [], "notes": [], "findings": [{"id": "x"}]},
        {"removed": [], "notes": [], "findings": [1]},
        {"removed": [], "notes": None, "findings": []},
    ],
)
def test_an_answer_that_is_none_is_not_believed(said):
    with pytest.raises((KeyError, TypeError, FormError)):
        farseries._checked(said)


def test_an_endless_answer_is_cut():
    removed, notes, findings = farseries._checked({"removed": ["x" * 9999] * 9999, "notes": [], "findings": []})
    assert (len(removed), len(removed[0]), notes, findings) == (1000, 1000, [], [])
