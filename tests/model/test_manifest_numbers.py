"""Numbers of a manifest: what a kernel can say can be read again."""

from __future__ import annotations

import json
from pathlib import Path

import blake3
import pytest

from gpuckpt.model import manifest as manifests
from gpuckpt.model.errors import ImageCorrupt

SAMPLE = Path(__file__).parents[1] / "data" / "manifest-format-1.json"


def with_inode(number: int) -> bytes:
    body = json.loads(SAMPLE.read_text())
    body.pop("blake3")
    body["tree"]["files"][0]["inode"] = number
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    return json.dumps({**body, "blake3": blake3.blake3(canonical).hexdigest()}).encode()


def test_an_inode_may_use_all_of_its_64_bits():
    """Cluster and union file systems make such numbers."""
    assert manifests.decode(with_inode(2**64 - 1), "x").tree.files[0].inode == 2**64 - 1


def test_a_number_that_no_kernel_knows_is_refused():
    with pytest.raises(ImageCorrupt, match="no possible number"):
        manifests.decode(with_inode(2**64 + 2048), "x")
