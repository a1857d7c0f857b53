"""What pip installs: built without a network, looked into, and run from where it was unpacked."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPLETIONS = {
    "gpuckpt.bash": "share/bash-completion/completions/gpuckpt",
    "_gpuckpt": "share/zsh/site-functions/_gpuckpt",
    "gpuckpt.fish": "share/fish/vendor_completions.d/gpuckpt.fish",
}


def run(*argv, **more):
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, **more)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is built from it: as pip does it for who has the sdist alone."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def installed_below_prefix():
    """Committed file -> where the wheel puts it."""
    places = {f"man/{page.name}": f"share/man/man1/{page.name}" for page in (ROOT / "man").glob("*.1")}
    places |= {f"completions/{name}": place for name, place in COMPLETIONS.items()}
    examples = ROOT / "man" / "examples"
    return places | {
        str(path.relative_to(ROOT)): f"share/doc/gpuckpt/examples/{path.relative_to(examples)}"
        for path in examples.rglob("*")
        if path.is_file()
    }


def test_the_wheel_has_every_page_and_script(built):
    with zipfile.ZipFile(built[0]) as wheel:
        data = {
            name.partition(".data/data/")[2]: wheel.read(name) for name in wheel.namelist() if ".data/data/" in name
        }
    assert data == {place: (ROOT / name).read_bytes() for name, place in installed_below_prefix().items()}


def test_the_sdist_has_them_and_the_sources(built):
    with tarfile.open(built[1]) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    assert {*installed_below_prefix(), "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "Makefile"} <= names
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "gpuckpt").rglob("*.py")} <= names


def test_the_installed_program_runs(built, tmp_path):
    """Its own dependencies come from this environment: to fetch them needs a network."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", built[0])
    (site,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/"}
    program = tmp_path / "venv" / "bin" / "gpuckpt"
    assert "dump" in run(program, "--help", env=environment, cwd="/")
    where = run(python, "-c", "import gpuckpt; print(gpuckpt.__file__)", env=environment, cwd="/").strip()
    assert Path(where).is_relative_to(site)
    assert os.access(tmp_path / "venv" / COMPLETIONS["gpuckpt.bash"], os.R_OK)
