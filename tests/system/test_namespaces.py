"""Process 1 of a namespace: which pids it leaves for CRIU; and looking into another network."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuckpt.system import namespaces, nsinit, procfs
from tests.cloning import free_port


@given(st.sets(st.integers(2, 32767), max_size=200))
def test_the_tree_needs_none_of_the_pids_that_criu_gets(needed):
    last = nsinit.last_before_spare(sorted(needed), 32768)
    assert last, "there is always room for a tree of this size"
    assert last + nsinit.SPARE < 32768
    assert not needed & set(range(last + 1, last + nsinit.SPARE))


def test_without_room_the_kernel_decides():
    assert nsinit.last_before_spare(list(range(300, 4000, 900)), 4000) == 0
    assert nsinit.last_before_spare([], 4000) == nsinit.SPARE


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_network_is_looked_into_and_left_again():
    port = f"tcp 127.0.0.1:{free_port()}"
    script = "import socket,sys; s=socket.create_server(('127.0.0.1', int(sys.argv[1]))); print(flush=True); sys.stdin.read()"
    argv = [
        "unshare",
        "--net",
        "sh",
        "-c",
        'ip link set lo up; exec "$@"',
        "sh",
        "python3",
        "-c",
        script,
        port.rpartition(":")[2],
    ]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        there = Path(f"/proc/{holder.pid}/ns/net")
        assert set(namespaces.in_network(there, lambda: procfs.ports_in_use([port]))) == {port}
        assert procfs.ports_in_use([port]) == {}
        holder.stdin.close()


def test_a_network_that_is_not_there_is_said_so():
    with pytest.raises(FileNotFoundError):
        namespaces.in_network(namespaces.network("no-such-network"), lambda: None)


def test_holes_stay_holes_in_a_clones_shared_memory(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    with source.open("wb") as file:
        file.write(b"begin")
        file.seek(8 << 20)
        file.write(b"middle" * 1000)
        file.truncate(16 << 20)
    with source.open("rb") as one, target.open("wb") as other:
        nsinit.copy(one.fileno(), other.fileno())
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks == source.stat().st_blocks
