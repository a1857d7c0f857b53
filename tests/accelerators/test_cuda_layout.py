"""The C interface of libcuda: sizes, offsets, UUIDs, old libraries."""

import ctypes
from types import SimpleNamespace

import pytest

from gpuckpt.accelerators import cuda
from gpuckpt.accelerators.protocol import DriverError
from gpuckpt.model.errors import MachineLacks
from tests.fakegpu.fixtures import compile_library

UUID_A = "GPU-00112233-4455-6677-8899-aabbccddeeff"
UUID_B = "GPU-fa4e0000-0000-0000-0000-000000000001"


@pytest.mark.parametrize("args", [cuda.LockArgs, cuda.CheckpointArgs, cuda.RestoreArgs, cuda.UnlockArgs])
def test_every_argument_is_64_zeroed_bytes(args):
    assert ctypes.sizeof(args) == 64
    assert bytes(args()) == bytes(64)


def test_offsets_are_those_of_the_header():
    assert ctypes.sizeof(cuda.CudaUuid) == 16
    assert ctypes.sizeof(cuda.GpuPair) == 32
    assert cuda.LockArgs.timeout_ms.offset == 0
    assert cuda.RestoreArgs.gpu_pairs.offset == 0
    assert cuda.RestoreArgs.gpu_pairs_count.offset == 8
    assert cuda.RestoreArgs.custom_storage.offset == 16


def test_a_uuid_is_its_bytes_in_written_order():
    assert bytes(cuda.cuda_uuid(UUID_A)).hex() == "00112233445566778899aabbccddeeff"


@pytest.mark.parametrize("text", ["MIG-00112233-4455-6677-8899-aabbccddeeff", "GPU-", "0", "", "GPU-xyz"])
def test_anything_else_is_no_uuid(text):
    with pytest.raises(ValueError):
        cuda.cuda_uuid(text)


def test_an_empty_map_is_a_zeroed_argument():
    assert bytes(cuda.restore_args({})) == bytes(64)


def test_a_map_is_an_array_of_pairs():
    args = cuda.restore_args({UUID_A: UUID_B, UUID_B: UUID_A})
    assert args.gpu_pairs_count == 2
    assert bytes(args.gpu_pairs[0]) == bytes(cuda.cuda_uuid(UUID_A)) + bytes(cuda.cuda_uuid(UUID_B))
    assert bytes(args.gpu_pairs[1]) == bytes(cuda.cuda_uuid(UUID_B)) + bytes(cuda.cuda_uuid(UUID_A))
    assert bytes(args)[12:] == bytes(52)


def test_a_libcuda_without_the_functions_is_too_old(tmp_path):
    library = cuda.load(str(compile_library("libcuda.c", tmp_path / "libcuda.so.1", "-DOLD_DRIVER")))
    assert cuda.driver_version(library) == 13000
    with pytest.raises(MachineLacks, match="too old") as caught:
        cuda.CudaApi(library, initialise=False)
    assert "570" in caught.value.hint


def test_drivers_before_580_do_not_get_a_map(fake_gpu):
    fake_gpu.configure(cuda=12080)
    api = cuda.CudaApi(cuda.load(fake_gpu.libcuda), initialise=False)
    with pytest.raises(DriverError, match="driver 580") as caught:
        api.restore(1, {UUID_A: UUID_B})
    assert caught.value.code == 801


def test_a_map_that_names_no_gpu_is_refused_before_the_driver_sees_it(fake_gpu):
    api = cuda.CudaApi(cuda.load(fake_gpu.libcuda), initialise=False)
    with pytest.raises(DriverError, match="not the UUID of a whole GPU"):
        api.restore(1, {"MIG-1": UUID_B})


@pytest.mark.parametrize(("initialise", "works"), [(True, True), (False, False)])
def test_without_persistence_mode_a_restore_needs_an_initialised_caller(
    fake_gpu, start_fake_cuda_app, initialise, works
):
    fake_gpu.configure(persistence=0)
    app = start_fake_cuda_app()
    api = cuda.CudaApi(cuda.load(fake_gpu.libcuda), initialise=initialise)
    api.lock(app.pid, 1000)
    api.checkpoint(app.pid)
    if works:
        api.restore(app.pid, {})
    else:
        with pytest.raises(DriverError, match="persistence mode is off"):
            api.restore(app.pid, {})


def test_a_restore_can_go_to_another_gpu(fake_gpu, start_fake_cuda_app):
    fake_gpu.configure(gpus=2)
    first, second = (f"GPU-fa4e0000-0000-0000-0000-00000000000{index}" for index in (0, 1))
    app = start_fake_cuda_app("--mib", "4")
    before = app.checksum()
    api = cuda.CudaApi(cuda.load(fake_gpu.libcuda), initialise=False)
    api.lock(app.pid, 1000)
    api.checkpoint(app.pid)
    with pytest.raises(DriverError, match="must name every GPU"):
        api.restore(app.pid, {first: second})
    api.restore(app.pid, {first: second, second: first})
    api.unlock(app.pid)
    assert app.checksum() == before
    assert (fake_gpu.used_bytes(0), fake_gpu.used_bytes(1)) == (0, 4 << 20)


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_restore_that_is_refused_without_a_map_is_tried_with_a_full_one(fake_gpu, start_fake_cuda_app, gpus):
    """A process on two GPUs; with one GPU there is nothing else to try."""
    fake_gpu.configure(gpus=gpus)
    uuids = [f"GPU-fa4e0000-0000-0000-0000-00000000000{index}" for index in range(gpus)]
    app = start_fake_cuda_app("--mib", "4")
    before = app.checksum()
    api = cuda.CudaApi(cuda.load(fake_gpu.libcuda), initialise=False, gpus=uuids)
    api.lock(app.pid, 1000)
    api.checkpoint(app.pid)
    fake_gpu.fail("restore=1 call 1")
    if gpus == 1:
        with pytest.raises(DriverError, match="several GPUs"):
            api.restore(app.pid, {})
        return
    api.restore(app.pid, {})
    api.unlock(app.pid)
    assert app.checksum() == before


def test_a_restore_without_a_map_gives_the_driver_no_argument():
    """So was it seen to work with a process on two GPUs."""
    seen = []
    library = SimpleNamespace(
        **dict.fromkeys(cuda._FUNCTIONS, lambda *_: 0), cuDriverGetVersion=lambda *_: 1, cuInit=lambda *_: 0
    )
    library.cuCheckpointProcessRestore = lambda pid, args: seen.append((pid, args)) or 0
    cuda.CudaApi(library, initialise=False).restore(7, {})
    assert seen == [(7, None)]
