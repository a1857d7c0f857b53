"""A far side that is no honest gpuckpt: lying_serve.py KIND serve

Serves images as gpuckpt does, but for one thing. It stands where --remote-command names the far gpuckpt.
"""

import json
import os
import sys
import time
from dataclasses import replace

from gpuckpt.model import manifest as manifests
from gpuckpt.stores import frames
from gpuckpt.stores.serving import Server
from gpuckpt.system.pipelink import link_of_program


def with_part(payload: bytes, **changes: object) -> bytes:
    """The manifest with another first part, its own digest right."""
    manifest = manifests.decode(payload, "x")
    return manifests.encode(replace(manifest, parts=(replace(manifest.parts[0], **changes), *manifest.parts[1:])))


class Liar(Server):
    """Lies about one thing."""

    def __init__(self, kind: str) -> None:
        super().__init__(link_of_program(0, 1), {"images": self._images})
        self._kind = kind

    def _greet(self) -> None:
        if self._kind == "older":
            frames.FEATURES = ("migrate", frames.SIGNATURES)
        super()._greet()

    def _images(self, header: dict, _payload: memoryview) -> tuple[dict, bytes]:
        """A directory with an image of impossible size."""
        image = {"name": "x", "path": "/x", "complete": True, "latest": False, "bytes_raw": 10**400}
        told = {"path": header["path"], "latest": None, "series": [{"name": "", "images": [image]}]}
        return {}, json.dumps(told).encode() if self._kind == "numbers" else b""

    def _open(self, header: dict, payload: memoryview) -> tuple[dict, bytes]:
        answer, manifest = super()._open(header, payload)
        if self._kind == "older":
            del answer["name"]
        if self._kind == "name":
            answer["name"] = "../escaped"
        changes = {"path": {"path": "criu/../../../etc/escaped"}, "huge": {"size": 1 << 55}}.get(self._kind)
        return answer, with_part(manifest, **changes) if changes else manifest

    def _read(self, header: dict, payload: memoryview) -> tuple[dict, bytes]:
        answer, content = super()._read(header, payload)
        part = self._offer.manifest.parts[header["part"]].path
        # Large frames, as they go into the held tree, and not the first of them.
        if not part.endswith(".zst") or header["at"] < 20_000_000 or len(content) < 1_000_000:
            return answer, content
        if self._kind == "frame":
            return answer, bytes(len(content))
        if self._kind == "endless":
            return answer, os.pread(content.descriptor, content.size, content.offset) * 3
        if self._kind == "silent":
            time.sleep(3600)
        return answer, content


if __name__ == "__main__":
    Liar(sys.argv[1]).run()
