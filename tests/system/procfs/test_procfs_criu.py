"""What /proc shows is what CRIU will ask for: the same names, sizes and modes."""

import shutil
import stat

import pytest

from gpuckpt.images import criuformat
from gpuckpt.system import commands
from tests.harness import criu_or_reason

pytestmark = pytest.mark.criu

PROGRAM = """
import multiprocessing
os.chdir(DIR)
f = open('data', 'w+b'); f.write(b'x' * 10000); f.flush()
private = mmap.mmap(f.fileno(), 4096, flags=mmap.MAP_PRIVATE); private[0:1] = b'y'; shared = mmap.mmap(f.fileno(), 4096)
g = open('gone', 'w'); g.write('abc'); g.flush(); os.unlink('gone')
semaphore = multiprocessing.get_context('fork').Semaphore(1)
d = os.open('.', os.O_RDONLY); os.mkfifo('fifo'); ff = os.open('fifo', os.O_RDWR)
z = open('/dev/zero', 'rb'); memfd = os.memfd_create('x'); event = ctypes.CDLL(None).eventfd(0, 0)
a, b = socket.socketpair(); r, w = os.pipe(); master, slave = os.openpty()
threading.Thread(target=forever, daemon=True).start()
if os.fork() == 0:
    ready(); forever()
forever()
"""


def test_files_are_those_in_criu_s_image(programs, read, tmp_path):
    child = programs.start(PROGRAM)
    tree = read(child)
    images = tmp_path / "images"
    images.mkdir()
    criu, _ = criu_or_reason()
    options = [
        "--no-default-config",
        "-L",
        str(images),
        "--link-remap",
        "--network-lock",
        "skip",
        "--manage-cgroups=ignore",
    ]
    argv = [str(criu), "dump", "-t", str(child.pid), "-D", str(images), "-o", str(images / "log"), "-R", *options]
    done = commands.run(argv, timeout=120)
    assert done.ok, (images / "log").read_text()[-2000:]
    theirs = criuformat.list_regular_files((images / "files.img").read_bytes())
    shutil.rmtree(images)
    ours = {file.path: file for file in tree.files}
    # CRIU writes ptys as terminals and as regular files; here they are terminals alone.
    assert {file.name for file in theirs if not file.name.startswith(("/dev/pts/", "/dev/ptmx"))} == set(ours)
    assert len(ours) > 10
    for file in theirs:
        if file.name in ours and stat.S_ISREG(ours[file.name].mode):
            assert file.size in {None, ours[file.name].size}, file.name
            assert file.mode in {None, ours[file.name].mode}, file.name
