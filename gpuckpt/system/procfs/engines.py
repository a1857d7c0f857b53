"""What a job is: the frameworks in its mapped files, their versions beside them, the model on its command line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from gpuckpt.model.facts import Engine
from gpuckpt.system.procfs.descriptors import DELETED
from gpuckpt.system.procfs.reading import list_names
from gpuckpt.system.procfs.redaction import redact_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuckpt.model.facts import OpenFile
    from gpuckpt.system.procfs.reading import Mapping

SERVING = ("vllm", "sglang", "tensorrt_llm", "lmdeploy", "llama.cpp", "ollama", "text-generation-inference")
FRAMEWORKS = ("torch", "jax", "tensorflow", "cupy", "paddle", "onnxruntime", "tensorrt", "triton", "numba", "deepspeed")
NAMES = (*SERVING, *FRAMEWORKS)
"""In the order in which they say most about a job: what serves, then what computes."""

PACKAGES = {
    **{name: name for name in NAMES if "." not in name and "-" not in name},
    "sgl_kernel": "sglang",
    "jaxlib": "jax",
    "jax_cuda12_plugin": "jax",
    "jax_cuda13_plugin": "jax",
    "cupy_backends": "cupy",
    "tensorrt_libs": "tensorrt",
}
"""Directory in site-packages from which something is mapped -> engine."""

DISTRIBUTIONS = {
    "tensorflow": ("tensorflow", "tensorflow_cpu", "tf_nightly"),
    "paddle": ("paddlepaddle_gpu", "paddlepaddle"),
    "onnxruntime": ("onnxruntime_gpu", "onnxruntime"),
    "jax": ("jax", "jaxlib"),
    "cupy": ("cupy_cuda13x", "cupy_cuda12x", "cupy_cuda11x", "cupy"),
    "tensorrt": ("tensorrt", "tensorrt_cu13", "tensorrt_cu12"),
}
"""Engine -> names of its distribution where they are not its own."""

LIBRARIES = {"libllama.so": "llama.cpp", "libnvinfer.so": "tensorrt"}
PROGRAMS = {"llama-server": "llama.cpp", "ollama": "ollama", "text-generation-server": "text-generation-inference"}
COMMAND_WORDS = (("vllm", "vllm"), ("sglang", "sglang"), ("text_generation_server", "text-generation-inference"))
"""A word of a command line that begins like this -> engine: pure Python engines map no file of their own."""

SITE = re.compile(r"^(?P<site>.*/(?:site|dist)-packages)/(?P<package>[^/]+)")
WEIGHTS = (".safetensors", ".gguf", ".ggml", ".pt", ".pth", ".ckpt", ".bin", ".h5", ".onnx", ".engine", ".npz")
SMALLEST_WEIGHTS = 1 << 20
"""Bytes: '.bin' and '.pt' are also the endings of small files that are no weights."""

MODEL_OPTIONS = ("--model", "--model-path", "--model-id", "--model-tag", "-m", "--served-model-name")
"""In order of preference; '-m' is llama.cpp's (python's own -m is skipped)."""


@dataclass(slots=True)
class EngineSearch:
    """Gathers traces of engines from the processes of a tree."""

    sites: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """A site-packages directory as the process names it -> the names in it."""
    names: dict[str, None] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)

    def add_process(self, pid: int, exe: str, argv: Sequence[str], mappings: Iterable[Mapping]) -> None:
        """Look at one process. `argv` is the full one: a model's name is taken from it."""
        for path in dict.fromkeys(mapping.path for mapping in mappings if mapping.path.startswith("/")):
            self._add_path(pid, path)
        program = PROGRAMS.get(PurePosixPath(exe).name)
        named = [engine for word, engine in COMMAND_WORDS if _names(argv, word)]
        for engine in (*([program] if program else []), *named):
            self.names.setdefault(engine)
            model = model_in(argv)
            if model:
                self.models.setdefault(engine, redact_text(model))

    def _add_path(self, pid: int, path: str) -> None:
        match = SITE.match(path)
        if match:
            self._add_site(pid, match["site"])
            engine = PACKAGES.get(match["package"])
        else:
            engine = LIBRARIES.get(PurePosixPath(path).name.partition(".so")[0] + ".so")
        if engine:
            self.names.setdefault(engine)

    def _add_site(self, pid: int, site: str) -> None:
        if site not in self.sites:
            self.sites[site] = tuple(list_names(f"/proc/{pid}/root{site}"))

    def engines(self, files: Iterable[OpenFile]) -> tuple[Engine, ...]:
        """What was found, the most telling first: it carries the weight files."""
        weights = tuple(file.path for file in files if is_weight_file(file))
        found = [name for name in NAMES if name in self.names]
        return tuple(
            Engine(name, self._version(name), self.models.get(name), weights if number == 0 else ())
            for number, name in enumerate(found)
        )

    def _version(self, engine: str) -> str | None:
        for distribution in DISTRIBUTIONS.get(engine, (engine,)):
            for names in self.sites.values():
                version = version_among(names, distribution)
                if version:
                    return version
        return None


def version_among(names: Iterable[str], distribution: str) -> str | None:
    """The version in 'torch-2.11.0.dist-info' or '….egg-info' among the names of a site-packages directory."""
    pattern = re.compile(rf"{re.escape(distribution)}-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info", re.IGNORECASE)
    return next((match[1] for name in names if (match := pattern.fullmatch(name))), None)


def is_weight_file(file: OpenFile) -> bool:
    """Open or mapped, with the name and the size of model weights."""
    return file.path.removesuffix(DELETED).endswith(WEIGHTS) and file.size >= SMALLEST_WEIGHTS


def _names(argv: Sequence[str], word: str) -> bool:
    """A program, script or module called `word`: 'vllm', '/usr/bin/vllm', 'vllm.entrypoints.cli'; options not."""
    commands = (PurePosixPath(argument).name for argument in _commands(argv))
    return any(command == word or command.startswith((f"{word}.", f"{word}::", f"{word}_")) for command in commands)


def _commands(argv: Sequence[str]) -> list[str]:
    """The program, an interpreter's script and module: what comes before the first option but -m."""
    found: list[str] = []
    for argument in argv[:6]:
        if argument.startswith("-"):
            if argument not in {"-m", "-u", "-s", "-I", "-B", "-E", "-P", "-O"}:
                break
            continue
        found.append(argument.lower())
    return found


def model_in(argv: Sequence[str]) -> str | None:
    """The model that a vLLM, SGLang or llama.cpp command line names, or None."""
    values = dict(reversed(_option_values(argv)))
    for option in MODEL_OPTIONS[:-1]:
        if option in values:
            return values[option]
    return _positional_model(argv) or values.get(MODEL_OPTIONS[-1])


def _option_values(argv: Sequence[str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for number, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name not in MODEL_OPTIONS or (name == "-m" and _is_module_option(argv, number)):
            continue
        if equals:
            found.append((name, value))
        elif number + 1 < len(argv):
            found.append((name, argv[number + 1]))
    return found


def _is_module_option(argv: Sequence[str], number: int) -> bool:
    return number > 0 and all(argument.startswith("-") for argument in argv[1:number])


def _positional_model(argv: Sequence[str]) -> str | None:
    """The word after 'serve' in 'vllm serve MODEL'."""
    for number, argument in enumerate(argv[:-1]):
        if argument == "serve" and not argv[number + 1].startswith("-"):
            return argv[number + 1]
    return None
