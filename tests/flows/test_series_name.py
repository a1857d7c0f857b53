"""How a series is called that nobody named."""

from __future__ import annotations

from pathlib import Path

from gpuckpt.flows import series
from gpuckpt.model.requests import DumpRequest


def test_an_encrypted_series_is_not_called_after_the_program(jobs):
    """Who can list the store reads names of images, and shall read nothing of the job."""
    pid = jobs.start("/bin/sleep", "1000").pid
    plain = DumpRequest(pid=pid, image=Path("/srv"))
    sealed = DumpRequest(pid=pid, image=Path("/srv"), encrypt_to=("age1x",))
    assert series.default_name(plain) == f"sleep-{pid}"
    assert series.default_name(sealed) == f"job-{pid}"
