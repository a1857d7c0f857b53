"""Recipients and identities: age's own and SSH's, and what is said of those that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuckpt.images import keys
from gpuckpt.model.errors import ImageCorrupt, NotFound, Refused, UsageError
from tests.sealed_images import age_key
from tests.sshd import ssh_keygen

SECRET = os.urandom(32)


def ssh_key(path: Path, passphrase: str = "", kind: str = "ed25519") -> tuple[Path, str]:
    ssh_keygen("-q", "-t", kind, "-N", passphrase, "-f", path)
    return path, path.with_name(path.name + ".pub").read_text().strip()


def test_each_recipient_opens_it_alone(tmp_path):
    pairs = [age_key(tmp_path / "age"), ssh_key(tmp_path / "ssh")]
    wrapped = keys.wrap(SECRET, keys.recipients([recipient for _, recipient in pairs]))
    for identity, _ in pairs:
        assert keys.unwrap(wrapped, identity) == SECRET
    assert SECRET not in wrapped


def test_recipients_from_a_file(tmp_path):
    (tmp_path / "list").write_text(f"# who may\n\n{age_key(tmp_path / 'a')[1]}\n{ssh_key(tmp_path / 'b')[1]}\n")
    wrapped = keys.wrap(SECRET, keys.recipients([str(tmp_path / "list")]))
    assert keys.unwrap(wrapped, tmp_path / "b") == SECRET


@pytest.mark.parametrize(
    "text", ["age1", "age1qqqq", "ssh-ed25519 AAAA", "ssh-dss AAAA", "/does/not/exist", "", "/dev/null"]
)
def test_no_recipient(text):
    with pytest.raises(UsageError, match="--encrypt-to"):
        keys.recipients([text])


def test_an_empty_file_of_recipients(tmp_path):
    (tmp_path / "list").write_text("# nobody\n")
    with pytest.raises(UsageError, match="no recipient stands in it"):
        keys.recipients([str(tmp_path / "list")])


def test_another_identity_opens_nothing(tmp_path):
    wrapped = keys.wrap(SECRET, [age_key(tmp_path / "mine")[1]])
    for identity, _ in (age_key(tmp_path / "other"), ssh_key(tmp_path / "ssh")):
        with pytest.raises(Refused, match="does not open the image"):
            keys.unwrap(wrapped, identity)


def test_every_byte_of_the_wrapped_key_counts(tmp_path):
    identity, recipient = age_key(tmp_path / "mine")
    wrapped = keys.wrap(SECRET, [recipient])
    for at in range(len(wrapped)):
        damaged = bytearray(wrapped)
        damaged[at] ^= 1
        with pytest.raises((Refused, ImageCorrupt)):
            keys.unwrap(bytes(damaged), identity)
        with pytest.raises((Refused, ImageCorrupt)):
            keys.unwrap(wrapped[:at], identity)


def test_a_key_of_another_length_is_no_image_key(tmp_path):
    identity, recipient = age_key(tmp_path / "mine")
    with pytest.raises(ImageCorrupt, match="holds no image key"):
        keys.unwrap(keys.wrap(b"short", [recipient]), identity)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: age_key(path)[0].chmod(0o640), "is not only yours"),
        (lambda path: ssh_key(path, "open sesame"), "must be decrypted first"),
        (lambda path: path.write_text("# nothing\n"), "holds no identity"),
        (lambda path: path.write_text("AGE-SECRET-KEY-1NONSENSE\n"), "no identity that can be used"),
        (lambda path: path.write_bytes(b"-----BEGIN OPENSSH PRIVATE KEY-----\nx\n"), "no identity that can be used"),
        (lambda path: path.mkdir(), "cannot be read"),
        (lambda path: path.symlink_to("/dev/null"), "cannot be read"),
        (os.mkfifo, "cannot be read"),
    ],
    ids=["open to others", "passphrase", "empty", "no key", "no ssh key", "directory", "link", "fifo"],
)
def test_an_identity_that_cannot_be_used_says_why_and_nothing_of_itself(tmp_path, make, why):
    path = tmp_path / "identity"
    make(path)
    if path.is_file() and not path.is_symlink() and why != "is not only yours":
        path.chmod(0o600)
    with pytest.raises((Refused, NotFound), match=why) as failure:
        keys.unwrap(keys.wrap(SECRET, [age_key(tmp_path / "mine")[1]]), path)
    assert "SECRET-KEY" not in failure.value.message
    assert "NONSENSE" not in failure.value.message
