"""A simulated CUDA driver: a subprocess with `environment(devices=2)` sees two GPUs that compute on
the CPU.

Built with cc at first use: nullgpu.c, and a stub for every other function of CUDA that torch's
libraries import.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nullgpu"
# The layouts of CUDA's structs, and which operators have kernels, depend on this version.
MADE_FOR = "2.14.1+cu130"
SOURCES = ("__init__.py", "nullgpu.c", "nccl.inc")
FLAGS = ("-O2", "-fPIC", "-fvisibility=hidden", "-w", "-std=gnu11")
CUDA = re.compile(
    r"(cuda|__cuda|cublas|cudnn|cusparse|cusolver|cufft|curand|nccl|cuFile|cu[A-Z]|nvml)"
)
WORKS_ALONE = re.compile(
    r"(nvrtc|nvshmem|cudnnGetVersion|cudnnGetCudart|cudnnGetErr|cudnnGetLast|cudnnGetProp)"
)
SETTINGS = re.compile(
    r"(cublas(Lt)?\w*Set(?!Vector|Matrix)\w+|cudnnSet\w+|cudnnRestoreDropout\w+|cuda\w*Destroy\w*|cuLogs\w+)"
)
KERNELS = re.compile(r"(cublas[A-Z]\w+|cudnn(Batch|Convolution|CTCLoss|Pooling|RNN|Spatial)\w*)")
NOT_SUPPORTED = {
    "cusparse": 10,
    "cusolver": 9,
    "cufft": 16,
    "cuFile": 5001,
    "curand": 201,
    "nvml": 3,
    "nccl": 5,
    "cublas": 15,
    "cudnn": 3000,
}


def missing() -> str | None:
    """Return why the driver cannot be build_if_missing here, as a sentence; None if it can."""
    if os.uname().sysname != "Linux" or os.uname().machine != "x86_64":
        return "nullgpu needs Linux on x86-64"
    for tool in ("cc", "nm", "strings"):
        if not shutil.which(tool):
            return f"nullgpu needs {tool}: apt-get install gcc binutils"
    version = importlib.metadata.version("torch")
    if not any(torch_libraries("libtorch_cuda.so")):
        return f"torch {version} is a build without CUDA"
    if torch_version() != MADE_FOR:
        return f"nullgpu is made for torch {MADE_FOR}, and this is {torch_version()}"
    return None


def torch_version() -> str:
    """Return the version of torch and its CUDA without an import, as 2.14.1+cu130."""
    text = (packages_folder() / "torch/version.py").read_text()
    match = re.search(r"^__version__ = '(.+)'", text, re.MULTILINE)
    return match[1] if match else "unknown"


def packages_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin
    return Path(spec.origin).parents[1]


def torch_libraries(pattern: str = "lib*.so") -> list[Path]:
    return [*(packages_folder() / "torch/lib").glob(pattern)]


def environment(
    devices: int = 1,
    memory_gib: float = 16.0,
    compute: bool = True,
    capability: str = "8.0",
    syncs: Path | None = None,
    forgets: bool = False,
    nccl_timeout_s: int = 60,
) -> dict[str, str]:
    """Return the environment variables of a subprocess that sees simulated GPUs.

    Add them to your own.

    Args:
        memory_gib: the memory of each device. A larger allocation is an out-of-memory error.
        compute: compute the right results. Otherwise kernels do nothing and take no time.
        capability: the capability of the simulated GPU: 8.0 has bf16, 7.5 does not.
        syncs: the folder for rank<RANK>.json, which counts synchronisations by line.
        forgets: do not keep large contents, so that many devices need little memory of this
            machine.
        nccl_timeout_s: the time after which a rank that waits in a collective gets an error.
    """
    library = build_if_missing(CACHE)
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "PATH")}
    first = {
        "PYTHONPATH": [HERE / "site", HERE.parent],
        "LD_LIBRARY_PATH": [library],
        "PATH": [HERE / "bin"],
    }
    paths = {
        name: ":".join([*map(str, first[name]), *filter(None, [value])])
        for name, value in before.items()
    }
    return paths | {
        "LD_PRELOAD": str(library / "libnullgpu.so"),
        "TRITON_LIBCUDA_PATH": str(library),
        "OMP_NUM_THREADS": "1",
        "NULLGPU_DEVICES": str(devices),
        "NULLGPU_MEMORY_GIB": str(memory_gib),
        "NULLGPU_COMPUTE": str(int(compute)),
        "NULLGPU_CAPABILITY": capability,
        "NULLGPU_SYNCS": str(syncs or ""),
        "NULLGPU_FORGETS": str(int(forgets)),
        "NULLGPU_NCCL_TIMEOUT_S": str(nccl_timeout_s),
    }


def build_if_missing(cache: Path) -> Path:
    """Return the folder with libnullgpu.so in `cache`, and build it if it is missing.

    Several processes may ask at once.
    """
    key = hashlib.sha256(torch_version().encode())
    for name in SOURCES:
        key.update((HERE / name).read_bytes())
    folder = cache / key.hexdigest()[:16]
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=cache))
        build(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            # Another process was first.
            shutil.rmtree(temporary)
    return folder


def build(folder: Path) -> None:
    cc("-c", HERE / "nullgpu.c", "-o", folder / "nullgpu.o")
    implemented = symbols(folder / "nullgpu.o", "--defined-only")
    (folder / "stubs.c").write_text(stubs(sorted(list_cuda_functions() - implemented)))
    library = folder / "libnullgpu.so"
    cc(
        "-shared",
        "-o",
        library,
        folder / "nullgpu.o",
        folder / "stubs.c",
        "-ldl",
        "-lpthread",
        "-Wl,-soname,libnullgpu.so",
    )
    # torch and Triton look these up by name.
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (folder / name).symlink_to(library.name)


def list_cuda_functions() -> set[str]:
    """Return the functions of CUDA that torch and torchvision import or look up by name, and those
    that Triton's launcher calls.
    """
    libraries = [*torch_libraries(), *(packages_folder() / "torchvision").glob("*.so")]
    imported = {
        name for library in libraries for name in symbols(library, "-D", "--undefined-only")
    }
    functions = {name for name in imported if CUDA.match(name) and not WORKS_ALONE.match(name)}
    looked_up = output("strings", "-n", "5", packages_folder() / "torch/lib/libc10_cuda.so").split()
    functions |= {name for name in looked_up if re.fullmatch(r"(cu|nvml)[A-Z][A-Za-z0-9_]+", name)}
    launcher = packages_folder() / "triton/backends/nvidia/driver.c"
    if launcher.exists():
        functions |= set(re.findall(r"\bcu[A-Z][A-Za-z0-9_]+(?=\()", launcher.read_text()))
    return functions


def stubs(names: list[str]) -> str:
    """Return C code in which settings succeed, computations count as kernels, and any other
    function prints its name and fails.
    """
    lines = ["void nullgpu_missing(const char *, char *);", "void nullgpu_kernel(void);"]
    for name in names:
        if SETTINGS.fullmatch(name):
            body = "return 0;"
        elif KERNELS.fullmatch(name):
            body = "nullgpu_kernel(); return 0;"
        else:
            code = next(
                (code for start, code in NOT_SUPPORTED.items() if name.startswith(start)), 801
            )
            body = f'static char told; nullgpu_missing("{name}", &told); return {code};'
        lines.append(f'__attribute__((visibility("default"))) int {name}(void) {{ {body} }}')
    return "\n".join(lines) + "\n"


def symbols(library: Path, *options: str) -> set[str]:
    return {
        line.split()[-1].split("@")[0]
        for line in output("nm", *options, library).splitlines()
        if line.strip()
    }


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def cc(*options: str | Path) -> None:
    subprocess.run(["cc", *FLAGS, *options], check=True)
