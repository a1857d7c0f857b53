"""A stand-in for NVIDIA's cuda-checkpoint program (555 and newer): same options, same words, same exit statuses."""

import argparse
import ctypes
import sys
import uuid

TEXTS = {
    1: "invalid argument",
    2: "out of memory",
    3: "initialization error",
    304: "OS call failed or operation not supported on this OS",
    401: "the operation cannot be performed in the present state",
    600: "device not ready",
    801: "operation not supported",
}
STATES = ("running", "locked", "checkpointed", "failed")


class LockArgs(ctypes.Structure):
    _fields_ = [("timeout", ctypes.c_uint), ("zero", ctypes.c_uint * 15)]


class RestoreArgs(ctypes.Structure):
    _fields_ = [("pairs", ctypes.c_char_p), ("count", ctypes.c_uint), ("zero", ctypes.c_uint * 13)]


def restore_args(device_map: str) -> RestoreArgs:
    raw = b"".join(
        uuid.UUID(name.removeprefix("GPU-")).bytes for pair in device_map.split(",") if pair for name in pair.split("=")
    )
    return RestoreArgs(raw or None, len(raw) // 32)


def main() -> int:
    parser = argparse.ArgumentParser(prog="cuda-checkpoint")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--action", choices=("lock", "checkpoint", "restore", "unlock"))
    parser.add_argument("--get-state", action="store_true")
    parser.add_argument("--get-restore-tid", action="store_true")
    parser.add_argument("--timeout", type=int, default=0)
    parser.add_argument("--device-map", default="")
    options = parser.parse_args()
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuInit(0)
    value = ctypes.c_int()
    if options.get_state:
        code = cuda.cuCheckpointProcessGetState(options.pid, ctypes.byref(value))
        what, answer = "get state of", STATES[value.value]
    elif options.get_restore_tid:
        code = cuda.cuCheckpointProcessGetRestoreThreadId(options.pid, ctypes.byref(value))
        what, answer = "get restore thread of", str(value.value)
    else:
        args = {"lock": LockArgs(options.timeout), "restore": restore_args(options.device_map)}.get(options.action)
        call = getattr(cuda, f"cuCheckpointProcess{options.action.capitalize()}")
        code = call(options.pid, ctypes.byref(args) if args else None)
        what, answer = f"{options.action} on", ""
    if code:
        print(f'Could not {what} process ID {options.pid}: "{TEXTS.get(code, "unknown error")}"', file=sys.stderr)
        return 1
    if answer:
        print(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
