"""Judgements of restores that are easy to get wrong, each from something seen."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from cases_restore import CAPTURED, DATA, OTHER_GPUS, SWAPPED
from checkfacts import (
    GPU0,
    LISTENING,
    OUTSIDE_TCP,
    STDOUT_PIPE,
    STDOUT_TTY,
    criu,
    driver,
    dump,
    file,
    gpu_restore,
    gpu_tree,
    host,
    judged,
    manifest,
    process,
    restore,
    tree,
    verdict,
    with_socket,
)

from gpuckpt.checks import (
    file_acts,
    needed_addresses,
    needed_ids,
    needed_paths,
    needed_ports,
    resolve_map,
)
from gpuckpt.model.facts import Descriptor, Socket


def test_flags_of_the_kernel_do_not_matter_but_instructions_do():
    less = replace(host().cpu, flags=tuple(f for f in host().cpu.flags if f not in ("md_clear", "erms", "fpu")))
    assert verdict("cpu-flags", restore(host=host(cpu=less))) == "pass"
    assert verdict("cpu-flags", restore(host=host(cpu=replace(less, flags=())))) == "unknown"


def test_an_append_only_log_may_have_grown():
    log = file("/srv/job/log", flags=os.O_WRONLY | os.O_APPEND)
    grown = replace(log, size=9000)
    assert verdict("files-size", restore(tree(files=(log,)), files={log.path: grown})) == "pass"
    plain = replace(log, flags=os.O_RDWR | os.O_APPEND)
    assert verdict("files-size", restore(tree(files=(plain,)), files={log.path: grown})) == "fail"
    mapped = replace(log, uses=("1000 fd 4", "1000 map"))
    assert verdict("files-size", restore(tree(files=(mapped,)), files={log.path: grown})) == "fail"


@pytest.mark.parametrize("path", ["/proc/meminfo", "/sys/devices/system/cpu/online"])
def test_kernel_files_and_deleted_files_are_not_looked_for(path):
    entries = (file(path), file("/tmp/gone", deleted=True, links=0))
    assert verdict("files-missing", restore(tree(files=entries), files={path: None})) == "pass"


def test_all_missing_files_are_named():
    entries = tuple(file(f"/srv/{n}") for n in range(300))
    found = judged("files-missing", restore(tree(files=entries), files={e.path: None for e in entries})).found
    assert all(entry.path in found for entry in entries)


def test_a_file_in_place_of_a_directory():
    assert "no directory" in judged("directories", restore(files={"/srv/job": file("/srv/job")})).found


def test_a_program_of_the_same_size_and_another_build_is_named_once():
    other = {"/usr/bin/python3": replace(restore().tree.files[0], build_id="cd", size=5)}
    assert verdict("files-size", restore(files=other)) == "pass"
    assert verdict("files-build", restore(files=other)) == "fail"


def test_a_changed_mtime_is_only_a_note():
    assert judged("files-content", restore(files={DATA: file(DATA, mtime=9.0)})).severity == "note"


def test_the_original_on_another_host():
    elsewhere = restore(made_left_running=True, host=host(hostname="node2"))
    assert (verdict("original", elsewhere), judged("original", elsewhere).blocks) == ("unknown", False)


def test_needed_ids_leave_out_the_session_that_started_the_job():
    job = tree(process(1010, pgid=1010, sid=4000), root_process=process(pgid=900, sid=900))
    assert needed_ids(manifest(job)) == {1000, 1001, 1010, 1011, 4000}


def test_needed_ports_and_addresses():
    sockets = (
        LISTENING,
        OUTSIDE_TCP,
        Socket(4, "inet6", "dgram", "", "[::1]:53", "", ("1000 fd 9",)),
        Socket(5, "inet6", "stream", "listen", "[::]:80", "", ("1000 fd 9",)),
    )
    image = manifest(tree(sockets=sockets))
    assert needed_ports(image, "keep") == ("tcp 0.0.0.0:8000", "tcp 10.0.0.1:40000", "udp [::1]:53", "tcp [::]:80")
    assert needed_ports(image, "close") == ("tcp 0.0.0.0:8000", "udp [::1]:53", "tcp [::]:80")
    assert needed_addresses(image, "keep") == ("10.0.0.1", "::1")
    assert needed_addresses(image, "close") == ("::1",)
    assert set(needed_paths(image)) == {"/usr/bin/python3", "/srv/job", DATA}


def test_a_file_stands_in_for_a_pipe_but_not_for_a_terminal():
    both = tree(outside_stdio=(STDOUT_TTY, replace(STDOUT_PIPE, fd=2)))
    found = judged("stdio", restore(both))
    assert "--stderr FILE" in found.hint
    assert "--stdout" not in found.hint
    assert "--wait" in judged("terminal", restore(both)).hint
    assert verdict("stdio", restore(both, ask_wait=True)) == "pass"


def test_kept_connections():
    away = restore(with_socket(OUTSIDE_TCP), made_tcp="keep", missing_addresses=("10.0.0.1",))
    assert judged("tcp-outside", away).severity == "note"
    assert "--tcp close" in judged("addresses", away).hint


def test_maps_are_resolved_by_index_uuid_and_beginning():
    old, new = restore().manifest.host.gpu.gpus, OTHER_GPUS
    assert resolve_map({"0": "GPU-dddd", "GPU-bbbb": "ccc"}, old, new) == (
        {"GPU-aaaa": "GPU-dddd", "GPU-bbbb": "GPU-cccc"},
        (),
    )
    assert len(resolve_map({"0": "1", "GPU-aaaa": "0"}, old, new)[1]) == 1
    assert "target twice" in resolve_map({"0": "1", "1": "1"}, old, new)[1][0]
    assert "no GPU of the image" in resolve_map({"": "1"}, old, new)[1][0]


def test_other_gpus_are_suggested_as_exact_options():
    found = judged("gpu-present", gpu_restore(host=driver(gpus=OTHER_GPUS)))
    assert "--gpu 0=0 --gpu 1=1" in found.hint
    mapped = gpu_restore(host=driver(gpus=OTHER_GPUS), ask_gpu_map={"0": "0", "1": "1"})
    assert verdict("gpu-present", mapped) == "pass"
    assert verdict("gpu-map", mapped) == "pass"


def test_one_pair_is_not_a_whole_map():
    """One old=new pair of two GPUs: the driver says INVALID_VALUE."""
    assert verdict("gpu-map", gpu_restore(ask_gpu_map={"0": "1"})) == "unknown"
    assert verdict("gpu-map", gpu_restore(ask_gpu_map={"1": "0"})) == "fail"
    assert "580" in judged("gpu-map", gpu_restore(ask_gpu_map=SWAPPED, host=driver(version="575.1"))).hint


def test_memory_is_looked_for_where_the_map_leads():
    full = driver(gpus=(replace(GPU0, memory_free_bytes=0), host().gpu.gpus[1]))
    assert verdict("gpu-memory", gpu_restore(host=full)) == "fail"
    assert verdict("gpu-memory", gpu_restore(host=full, ask_gpu_map=SWAPPED)) == "pass"


def test_holders_are_named_by_pid_when_nothing_better_is_known():
    full = driver(gpus=(replace(GPU0, memory_free_bytes=0, compute_pids=(812,)),))
    assert "process 812" in judged("gpu-memory", gpu_restore(host=full)).found


def test_an_image_that_does_not_say_how_much_gpu_memory_it_had():
    job = gpu_tree(gpu_uses=())
    facts = restore(job, made_cuda=tuple(replace(c, gpu_memory_bytes={}) for c in manifest(job).cuda))
    assert judged("gpu-memory", facts).blocks


def test_a_stdin_given_for_nothing():
    assert verdict("stdio-used", restore(ask_stdio={0: Path("/dev/null")})) == "fail"


def test_descriptors_of_several_processes_are_all_named():
    child = process(1010, comm="loader", descriptors=(Descriptor(7, "device", "/dev/kfd"),))
    assert "1010 loader fd 7: /dev/kfd" in judged("devices", dump(tree(child))).found


def test_terminals_are_the_terminal_checks_affair():
    assert judged("stdio", restore(tree(outside_stdio=(STDOUT_TTY,)))) is None
    assert judged("terminal", restore(tree(outside_stdio=(STDOUT_PIPE,)))) is None


def test_sockets_without_a_port_take_none():
    raw = Socket(6, "inet", "raw", "unconnected", "0.0.0.0:1", "", ("1000 fd 9",))
    unbound = Socket(7, "inet", "stream", "closed", "0.0.0.0:0", "", ("1000 fd 10",))
    assert needed_ports(manifest(tree(sockets=(raw, unbound))), "keep") == ()


def test_a_log_that_grew_comes_with_the_command_that_cuts_it():
    log = file("/srv/my job/log", size=72)
    grown = restore(tree(files=(log,)), files={log.path: replace(log, size=90)})
    assert judged("files-size", grown).hint.endswith(
        "`cp -a '/srv/my job/log' '/srv/my job/log.later' && truncate -s 72 '/srv/my job/log'`"
    )
    shrunk = restore(tree(files=(log,)), files={log.path: replace(log, size=9)})
    assert "truncate" not in judged("files-size", shrunk).hint


def test_a_gpu_map_for_an_image_without_gpu_is_a_warning():
    found = judged("gpu-map", restore(ask_gpu_map={"0": "1"}))
    assert (found.verdict, found.severity) == ("fail", "warn")
    assert judged("gpu-map", restore()) is None


BIG = file(DATA, size=9000)
LOG = file(DATA, flags=os.O_WRONLY)
APPENDED = file(DATA, flags=os.O_WRONLY | os.O_APPEND)


@pytest.mark.parametrize(
    ("at_the_dump", "here", "compared", "acts"),
    [
        # missing, as it was, grown, another: with no option, --truncate-files, --overwrite-files, both
        (LOG, None, None, ("put", "put", "put", "put")),
        (LOG, LOG, "same", ("", "", "", "")),
        (LOG, BIG, "grown", ("", "cut", "replace", "cut")),
        (LOG, BIG, "other", ("", "", "replace", "replace")),
        (LOG, LOG, "other", ("", "", "replace", "replace")),
        (APPENDED, BIG, "grown", ("", "cut", "replace", "cut")),
        (APPENDED, BIG, "other", ("", "", "replace", "replace")),
        # What could not be read is not the same.
        (LOG, LOG, None, ("", "", "replace", "replace")),
    ],
)
def test_what_is_done_to_a_captured_file(at_the_dump, here, compared, acts):
    found = []
    for truncate, overwrite in ((False, False), (True, False), (False, True), (True, True)):
        facts = restore(
            tree(files=(at_the_dump,)),
            made_captured=(CAPTURED,),
            files={DATA: here},
            captured_here={DATA: compared} if compared else {},
            ask_truncate_files=truncate,
            ask_overwrite_files=overwrite,
        )
        found.append(next((act.kind for act in file_acts(facts)), ""))
        judged_well = {verdict("files-size", facts), verdict("files-changed", facts), verdict("files-missing", facts)}
        fine = compared == "same" or found[-1] or at_the_dump is APPENDED
        assert (judged_well == {"pass"}) == bool(fine)
    assert tuple(found) == acts


@pytest.mark.parametrize(
    ("at_the_dump", "here", "acts"),
    [
        (LOG, BIG, ["cut"]),
        (APPENDED, BIG, ["cut"]),
        (replace(LOG, uses=("1000 map shared-write",), flags=None), BIG, ["cut"]),
        # The job only reads it: what it grew by is somebody else's.
        (file(DATA, flags=os.O_RDONLY), BIG, []),
        (replace(LOG, build_id="ab"), BIG, []),
        (LOG, file(DATA, size=1), []),
        (LOG, None, []),
    ],
)
def test_what_is_done_to_a_file_that_is_not_in_the_image(at_the_dump, here, acts):
    facts = restore(tree(files=(at_the_dump,)), files={DATA: here}, ask_truncate_files=True, ask_overwrite_files=True)
    assert [act.kind for act in file_acts(facts)] == acts


def test_a_file_that_is_replaced_may_have_any_owner_and_mode():
    others = replace(LOG, mode=0o100600, uid=1000, size=1)
    asked = {"made_captured": (CAPTURED,), "files": {DATA: others}, "captured_here": {DATA: "other"}}
    one = tree(files=(LOG,))
    assert verdict("files-mode", restore(one, **asked)) == verdict("files-owner", restore(one, **asked)) == "fail"
    facts = restore(one, **asked, ask_overwrite_files=True)
    assert verdict("files-mode", facts) == verdict("files-owner", facts) == "pass"


TOO = f"{DATA}.too"
NAMES = (CAPTURED, replace(CAPTURED, path=TOO, linked_to=DATA))
"""One file of the tree under two names."""


@pytest.mark.parametrize(
    ("here", "compared", "acts"),
    [
        ((None, None), (), [("put", ""), ("put", DATA)]),
        ((1, None), ("same",), [("put", DATA)]),
        ((None, 1), ("", "same"), [("put", TOO)]),
        ((1, 1), ("same", "same"), []),
        ((1, 1), ("other", "other"), [("replace", ""), ("replace", DATA)]),
        ((1, 1), ("grown", "grown"), [("cut", ""), ("cut", DATA)]),
        # Two files by now.
        ((1, 2), ("same", "same"), [("replace", DATA)]),
        ((1, 2), ("other", "same"), [("replace", ""), ("replace", DATA)]),
    ],
)
def test_names_of_one_file_are_its_names_again(here, compared, acts):
    size = 9000 if "grown" in compared else LOG.size
    files = {
        path: inode and replace(LOG, path=path, inode=inode, size=size)
        for path, inode in zip((DATA, TOO), here, strict=True)
    }
    facts = restore(
        tree(files=(LOG, replace(LOG, path=TOO))),
        made_captured=NAMES,
        files=files,
        captured_here={path: how for path, how in zip((DATA, TOO), compared, strict=False) if how},
        ask_truncate_files=True,
        ask_overwrite_files=True,
    )
    assert [(act.kind, act.link_to) for act in file_acts(facts)] == acts
    assert {verdict(name, facts) for name in ("files-size", "files-changed", "files-missing")} == {"pass"}


def test_two_files_that_were_one_are_said():
    files = {DATA: LOG, TOO: replace(LOG, path=TOO, inode=LOG.inode + 1)}
    asked = {"made_captured": NAMES, "files": files, "captured_here": dict.fromkeys(files, "same")}
    found = judged("files-changed", restore(tree(files=(LOG, replace(LOG, path=TOO))), **asked))
    assert found.verdict == "fail" and f"{TOO} (it was the same file as {DATA})" in found.found


def test_no_file_is_put_into_a_directory_that_is_not_there():
    made = {"made_captured": (CAPTURED,)}
    found = judged("directories", restore(tree(files=(LOG,)), files={DATA: None, "/srv/job": None}, **made))
    assert (found.verdict, found.hint) == ("fail", "make each, with the owner it had: mkdir -p /srv/job")
    assert DATA in found.found
    linked = {DATA: None, "/srv/job": replace(tree().files[1], resolved="/home/x")}
    assert "link" in judged("directories", restore(tree(files=(LOG,)), files=linked, **made)).found
    assert "/srv/job" in needed_paths(manifest(tree(files=(LOG,)), captured=(CAPTURED,)))


def test_an_option_is_named_only_where_it_helps():
    shrunk = restore(tree(files=(LOG,)), files={DATA: file(DATA, size=1)})
    assert "--" not in judged("files-size", shrunk).hint
    grown = judged("files-size", restore(tree(files=(LOG,)), files={DATA: BIG})).hint
    assert "--truncate-files" in grown and "not known" in grown and "--overwrite" not in grown


@pytest.mark.parametrize("path", ["/proc/sys/kernel/core_pattern", "/sys/kernel/x"])
def test_files_of_the_kernel_are_never_changed(path):
    """Whatever a forged manifest says of them."""
    one = replace(LOG, path=path)
    facts = restore(
        tree(files=(one,)),
        made_captured=(replace(CAPTURED, path=path),),
        files={path: replace(one, size=9000)},
        captured_here={path: "grown"},
        ask_truncate_files=True,
        ask_overwrite_files=True,
    )
    assert file_acts(facts) == ()


@pytest.mark.parametrize(("tcp", "said"), [("keep", "fail"), ("close", "pass")])
def test_only_nftables_holds_packets_back_until_a_tree_with_kept_connections_is_there(tcp, said):
    """CRIU restores with the lock of the dump; gpuckpt's own, before that, needs the kernel's nf_tables."""
    options = replace(manifest().criu, network_lock="iptables")
    facts = restore(
        with_socket(OUTSIDE_TCP), made_criu=options, made_tcp=tcp, host=criu(network_lock="iptables"), ask_tcp=tcp
    )
    assert verdict("network-lock", facts) == said
