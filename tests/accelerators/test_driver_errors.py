"""What a DriverError says, for every code and action, and how the program's words become codes."""

import pytest

from gpuckpt.accelerators import cuda_program
from gpuckpt.accelerators.protocol import ERROR_NAMES, DriverError

ACTIONS = ["restore-tid", "state", "lock", "checkpoint", "restore", "unlock"]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("code", [*ERROR_NAMES, 719])
def test_every_error_names_process_step_cause_and_code(action, code):
    text = DriverError(4711, action, code).explain()
    assert text.startswith(f"CUDA {action} of process 4711 failed: ")
    assert text.endswith(f"({ERROR_NAMES.get(code, 'error 719')}, {code})")
    assert "\n" not in text
    assert str(DriverError(4711, action, code)) == text


def test_only_a_restore_out_of_memory_is_final():
    final = [(a, c) for a in ACTIONS for c in ERROR_NAMES if DriverError(1, a, c).final]
    assert final == [("restore", 2)]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ('Could not lock on process ID 7: "OS call failed or operation not supported on this OS"', 304),
        ('Error toggling CUDA in process ID 98145: "operation not permitted"', 800),
        ('Error initializing CUDA: "initialization error"', 3),
        ('Could not restore on process ID 7: "out of memory"', 2),
        ('Could not lock on process ID 7: "device not ready"', 600),
        ('Could not lock on process ID 7: "some new text"', 999),
        ("Segmentation fault", 999),
        ("", 999),
    ],
)
def test_the_programs_words_become_codes(words, code):
    assert cuda_program.code_of(words) == code


def test_a_program_that_cannot_be_started_is_a_driver_error():
    with pytest.raises(DriverError, match="/no/such/program"):
        cuda_program.CudaProgram("/no/such/program").state(1)


def test_a_program_that_hangs_is_ended(tmp_path, monkeypatch):
    program = tmp_path / "cuda-checkpoint"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(cuda_program, "QUESTION_SECONDS", 0.2)
    with pytest.raises(DriverError, match=r"was ended after 0\.2 s") as caught:
        cuda_program.CudaProgram(str(program)).state(1)
    assert caught.value.code == 909


def test_an_answer_that_is_no_number_is_an_error(tmp_path):
    program = tmp_path / "cuda-checkpoint"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o755)
    with pytest.raises(DriverError, match="unexpected answer 'hello'"):
        cuda_program.CudaProgram(str(program)).restore_tid(1)
    assert cuda_program.CudaProgram(str(program)).state(1) == "unknown"
