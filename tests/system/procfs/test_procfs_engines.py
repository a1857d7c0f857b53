import sys

import pytest

from gpuckpt.system.procfs import engines


@pytest.mark.parametrize(
    ("argv", "model"),
    [
        (["vllm", "serve", "org/m", "--port", "1"], "org/m"),
        (["/usr/bin/python3", "/usr/bin/vllm", "serve", "--dtype", "auto", "--model", "org/m"], "org/m"),
        (["python3", "-m", "vllm.entrypoints.openai.api_server", "--model=org/m"], "org/m"),
        (["python", "-m", "sglang.launch_server", "--model-path", "/w/m", "--served-model-name", "x"], "/w/m"),
        (["python", "-m", "vllm.entrypoints.api_server", "--served-model-name", "x"], "x"),
        (["vllm", "serve", "org/m", "--served-model-name", "x"], "org/m"),
        (["llama-server", "-c", "1", "-m", "/w/m.gguf"], "/w/m.gguf"),
        (["python", "-m", "sglang.launch_server", "--port", "1"], None),
        (["vllm", "serve", "--model"], None),
        ([], None),
    ],
)
def test_model_on_the_command_line(argv, model):
    assert engines.model_in(argv) == model


@pytest.fixture
def site(tmp_path):
    """A site-packages directory as pip leaves it."""
    site = tmp_path / "lib" / "site-packages"
    for package, library in (("torch", "libtorch.so"), ("vllm", "_C.abi3.so"), ("jaxlib", "x.so"), ("other", "o.so")):
        (site / package).mkdir(parents=True)
        (site / package / library).write_bytes(b"\0" * 8192)
    for name in (
        "torch-2.11.0+cu128.dist-info",
        "torch_geometric-9.9.dist-info",
        "vllm-0.12.1.dist-info",
        "jax-0.8.0.dist-info",
    ):
        (site / name).mkdir()
    return site


MAP = """
keep = []
for path in sys.argv[1:]:
    if path.startswith('/'):
        file = open(path, 'rb'); keep.append(mmap.mmap(file.fileno(), 4096, prot=1)); file.close()
ready(); forever()
"""


def test_engines_are_found_by_what_is_mapped(programs, read, site, tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\0" * (2 << 20))
    small = tmp_path / "small.bin"
    small.write_bytes(b"\0" * 5000)
    paths = [
        site / "torch" / "libtorch.so",
        site / "vllm" / "_C.abi3.so",
        site / "jaxlib" / "x.so",
        site / "other" / "o.so",
        weights,
        small,
    ]
    child = programs.start(MAP, arguments=[str(path) for path in paths])
    vllm, torch, jax = read(child).engines
    assert (vllm.name, vllm.version, vllm.weight_files) == ("vllm", "0.12.1", (str(weights),))
    assert (torch.name, torch.version, torch.weight_files) == ("torch", "2.11.0+cu128", ())
    assert (jax.name, jax.version) == ("jax", "0.8.0")
    assert read(programs.start("ready(); forever()")).engines == ()


def test_an_engine_by_its_command_line(programs, read, site, tmp_path):
    """SGLang maps nothing of its own when its kernels are not loaded: the module's name says it."""
    (site / "sglang-0.5.4.dist-info").mkdir()
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(
        "import mmap, os, sys, time\n"
        "f = open(os.environ['MAPPED'], 'rb'); keep = mmap.mmap(f.fileno(), 4096, prot=1)\n"
        "open(os.environ['TEST_DIR'] + '/ready', 'w').close()\n"
        "while True: time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "org/m", "--api-key", "S3"]
    code = f"os.chdir(DIR); os.execv(sys.executable, {command!r})"
    child = programs.start(code, env={"MAPPED": str(site / "torch" / "libtorch.so"), "PYTHONPATH": str(tmp_path)})
    found = {engine.name: engine for engine in read(child).engines}
    assert list(found) == ["sglang", "torch"]
    assert (found["sglang"].version, found["sglang"].model) == ("0.5.4", "org/m")


def test_versions():
    names = ["torch-2.1.dist-info", "Torch_x-3.dist-info", "cupy_cuda12x-13.4.1.dist-info", "old-1.0-py3.11.egg-info"]
    assert engines.version_among(names, "torch") == "2.1"
    assert engines.version_among(names, "cupy_cuda12x") == "13.4.1"
    assert engines.version_among(names, "old") == "1.0"
    assert engines.version_among(names, "tor") is None
