"""A cgroup of its own is a wish: where the kernel refuses it the restore goes on without."""

from gpuckpt.system import commands
from gpuckpt.system.cgroups import OwnCgroup


def test_a_refused_move_does_not_stop_the_start(tmp_path):
    own = OwnCgroup(tmp_path, "one")
    (own.path / "cgroup.procs").mkdir()
    child = commands.start(["/bin/true"], before_exec=own.join)
    assert child.wait(10) == 0
