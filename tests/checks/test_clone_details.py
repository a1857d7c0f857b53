"""What a clone, or a tree with namespaces of its own, is judged by: not by what others have here."""

from __future__ import annotations

import os
from dataclasses import replace

from cases_restore import LOG, SAVED, SHARED
from checkfacts import LISTENING, judged, manifest, restore, tree, verdict, with_socket

from gpuckpt.checks import file_acts, needed_ports
from gpuckpt.model.manifest import OPEN, CapturedFile

COPY = CapturedFile(LOG.path, "files/open-1", OPEN, 0o644, 0, 0, 0)


def test_a_clone_puts_no_file_back_and_offers_no_option_that_would():
    missing = {"files": {LOG.path: None, "/var/log": None}}
    plain = restore(tree(files=(LOG,)), made_captured=(COPY,), **missing)
    clone = restore(tree(files=(LOG,)), made_captured=(COPY,), ask_clone=True, **missing)
    assert [act.kind for act in file_acts(plain)] == ["put"]
    assert file_acts(clone) == ()
    assert verdict("files-missing", plain) == "pass"
    assert verdict("files-missing", clone) == "fail"
    changed = restore(tree(files=(LOG,)), made_captured=(COPY,), ask_clone=True, captured_here={LOG.path: "grown"})
    said = judged("files-changed", changed)
    assert (said.verdict, "--" in said.hint) == ("fail", False)


def test_what_lies_in_the_hosts_shared_memory_is_nothing_to_a_clone():
    gone = {SHARED.path: None}
    assert verdict("files-missing", restore(tree(files=(SHARED,)), files=gone)) == "fail"
    assert verdict("files-missing", restore(tree(files=(SHARED,)), files=gone, ask_clone=True)) == "pass"
    assert verdict("clone-memory", restore(tree(files=(SHARED,)), made_captured=(SAVED,))) is None


def test_pids_of_others_are_nothing_to_a_namespace():
    taken = {"ids_in_use": {1000: "812 sleep"}}
    assert verdict("pids-free", restore(**taken)) == "fail"
    for asked in ({"ask_clone": True}, {"ask_isolate": frozenset({"pid"})}):
        assert verdict("pids-free", restore(**taken, **asked)) == "pass"
    assert verdict("pids-free", restore(**taken, ask_isolate=frozenset({"net"}))) == "fail"


def test_ports_are_looked_for_under_their_new_numbers():
    image = manifest(with_socket(LISTENING))
    assert needed_ports(image, "refuse", {8000: 8001}) == ("tcp 0.0.0.0:8001",)
    assert needed_ports(image, "refuse", {9000: 9001}) == ("tcp 0.0.0.0:8000",)


def test_only_files_that_are_written_to_are_shared_in_a_way_that_harms():
    reads = replace(LOG, flags=os.O_RDONLY)
    assert verdict("clone-files", restore(tree(files=(reads,)), ask_clone=True)) == "pass"
    assert verdict("clone-files", restore(tree(files=(LOG,)))) is None
