"""What a far side that runs as root still does once it has given root up for one image."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuckpt.model.errors import NotFound, Refused
from gpuckpt.stores.local import DirectoryStore
from gpuckpt.stores.ssh import SshStore
from gpuckpt.system.ssh import Account, Caller
from tests.small_images import make_image
from tests.sshd import REMOTE_COMMAND

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has something to give up")


@pytest.fixture
def store(sshd):
    opened = SshStore(Caller(Account("far", config=sshd.config)), REMOTE_COMMAND)
    yield opened
    opened.close()


@pytest.fixture
def image(tmp_path) -> Path:
    (tmp_path / "here").mkdir(mode=0o700)
    return make_image(tmp_path / "here" / "one", 0.5)


def test_one_that_takes_an_image_in_keeps_to_its_directory(store, image, tmp_path):
    source = DirectoryStore().offer(str(image))
    store.receive(str(tmp_path / "there" / "one"), source.raw_manifest, source).close()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    with pytest.raises(Refused, match="for another place"):
        store.receive(str(tmp_path / "elsewhere" / "one"), source.raw_manifest, source)
    with pytest.raises(NotFound, match="Permission denied"):
        store.receive(str(tmp_path / "new" / "one"), source.raw_manifest, source)
    with pytest.raises(Refused, match="for another place"):
        store.offer(str(image))
    for question in ("host", "judge", "prepare", "go"):
        with pytest.raises(Refused, match="has given up"):
            store.question({"do": question})
    # In its directory it goes on, an image of a series there included.
    store.receive(str(tmp_path / "there" / "two"), source.raw_manifest, source).close()
    series = {"do": "series", "path": str(tmp_path / "there" / "x-20261130T140526Z"), "name": "x", "rules": {}}
    store.question(series, most=1 << 20)
    with pytest.raises(Refused, match="for another place"):
        store.question({**series, "path": "/etc/x-20261130T140526Z"}, most=1 << 20)
    source.close()


def test_one_that_reads_an_image_writes_nothing(store, image):
    offer = store.offer(str(image))
    offer.close()
    with pytest.raises(Refused, match="for another place"):
        store.receive(str(image.parent / "two"), offer.raw_manifest, None)
    assert [path.name for path in image.parent.iterdir()] == ["one"]


def test_one_to_which_a_job_comes_keeps_what_that_takes(store, image):
    with pytest.raises(Exception, match="form"):
        store.question({"do": "judge", "terms": 7})
    store.offer(str(image)).close()
    assert store.question({"do": "host"}, most=16 << 20).payload
