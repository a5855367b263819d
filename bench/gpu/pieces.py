"""The pieces of ``make gpu``: commands that each take at most nine minutes and are not repeated once they passed."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from bench import record

LIVE = record.ROOT / "tests" / "integration"
NOT_ON_ONE_GPU = {
    **dict.fromkeys(
        ("test_tp2", "test_tp2_killed", "test_two_machines", "test_ranks_differ", "test_loop_ray"),
        "two ranks on one GPU cannot form an NCCL group",
    ),
    **dict.fromkeys(
        ("test_areal", "test_own_rollouts", "test_sglang_router", "test_slime", "test_verl"),
        "it downloads packages, and no piece does",
    ),
    "test_gpu_rehearsal": "a rehearsal is for machines without a GPU",
    "test_pace": "--april-cpu-pace paces the CPU platform only",
}
"""Live tests that are no piece on a GPU, with the reason."""
REHEARSED = ("test_smoke",)
"""The live tests of a rehearsal; `make test` runs all of them."""
PLAIN = "--attention-backend triton --sampling-backend pytorch"
"""Backends that take any head size and float32, as the tiny models have them."""
BACKENDS = {"cuda": ("default", "flashinfer", "fa3", "triton"), "rocm": ("default", "aiter", "triton")}
FA3_MAJORS = 8, 9
"""Compute capabilities on which SGLang accepts `fa3`."""
CONTINUES = "the budget was too small"
"""What bench.rollout prints if cells are left; the next call measures them under the same run id."""

RUN_ID = "RUN_ID"
"""Placeholder for the piece's run id, which names commit and start and is kept until the piece has passed."""


@dataclass(frozen=True)
class Piece:
    """One command. It passed if it ends with status 0 and does not print `CONTINUES`."""

    name: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def of_run(self, run_id: str) -> Self:
        """The piece with a run id in its command."""
        return replace(self, command=tuple(run_id if word == RUN_ID else word for word in self.command))


@dataclass(frozen=True)
class GpuSetting:
    """Where the pieces run."""

    kind: str
    """`cuda`, `rocm`, or `cpu`: a rehearsal."""
    folder: Path
    """Folder of logs, checkpoints and the state."""
    results: Path
    """Folder of rows."""
    gpu_gb: int = 0
    major: int = 9
    """Of the GPU's compute capability, with CUDA."""
    checkpoints: tuple[Path, Path] | None = None
    """Two checkpoints of one model of Qwen3-0.6B's shape; None: random ones are made."""

    @property
    def rehearsal(self) -> bool:
        return self.kind == "cpu"

    @property
    def models(self) -> tuple[Path, Path]:
        return self.checkpoints or (self.folder / "checkpoints" / "a", self.folder / "checkpoints" / "b")

    def rows(self, bench: str) -> Path:
        """The file of a benchmark's rows."""
        return self.results / f"{bench}.json"


def pieces(setting: GpuSetting) -> list[Piece]:
    """All pieces, the most important first: checks of exactness, then measurements of speed."""
    found = [Piece("machine", _python("bench.gpu.machine", *(["--no-gpu"] if setting.rehearsal else [])))]
    found += _resume(setting)
    found += _live(setting)
    small = setting.rehearsal
    if not small:  # `make test` runs them in Triton's interpreter
        found.append(Piece("kernel tests", _python("pytest", "-q", "-k", "gpu", "tests/kernels/test_kernels.py")))
    kernels = ["--layers", "1", "--heads", "2", "--dim", "32", "--tokens", "64"] if small else []
    found.append(Piece("kernels", _python("bench.kernels", "--out", str(setting.rows("kernels")), *kernels)))
    stop = ["--running", "4", "--repetitions", "1"] if small else ["--running", "64", "256", "1024"]
    stop += [] if small else ["--reply-tokens", "1000000", "--server-options", PLAIN]
    found.append(Piece("stop", _python("bench.stop_latency", "--out", str(setting.rows("stop_latency")), *stop)))
    found += [_rollout("april", setting), _pace(setting)]
    if not small:
        found += [_rollout(preset, setting) for preset in ("long", "short-rounds", "dapo")]
    demo = ["--rounds", "1", "--warmup-rounds", "0", "--groups", "2", "--slots", "8", "--steps", "0"] if small else []
    found.append(Piece("demo", _python("examples.april_demo", "--out", str(setting.folder / "demo"), *demo)))
    return found


def _python(module: str, *rest: str) -> tuple[str, ...]:
    return sys.executable, "-m", module, *rest


def _resume(setting: GpuSetting) -> list[Piece]:
    """Whether a resumed sample equals an uninterrupted one, from each tier, for each attention backend."""
    record_to = ["--record", str(setting.rows("resume"))]
    if setting.rehearsal:
        small = ["--samples", "2", "--prompt", "24", "--length", "24"]
        return [Piece("resume default", _python("bench.resume", *record_to, *small))]
    found = []
    if setting.checkpoints is None:
        for seed, path in enumerate(setting.models):
            made = _python("bench.random_checkpoint", str(path), "--shape", "qwen3-0.6b", "--seed", str(seed))
            found.append(Piece(f"checkpoint {path.name}", made))
    for backend in BACKENDS[setting.kind]:
        if backend == "fa3" and setting.major not in FA3_MAJORS:
            continue
        options = [] if backend == "default" else ["--server-options", f"--attention-backend {backend}"]
        command = _python("bench.resume", "--model", str(setting.models[0]), *record_to, *options)
        found.append(Piece(f"resume {backend}", command))
    return found


def _live(setting: GpuSetting) -> list[Piece]:
    """A piece for each file of live tests, on a GPU in float32 with the backends that take it."""
    names = sorted(path.stem for path in LIVE.glob("test_*.py"))
    names = [name for name in names if (name in REHEARSED if setting.rehearsal else name not in NOT_ON_ONE_GPU)]
    on_gpu = (("APRIL_TEST_SERVER_OPTIONS", PLAIN), ("TRITON_F32_DEFAULT", "ieee"))  # Triton's default is TF32
    environment = () if setting.rehearsal else on_gpu
    return [
        Piece(f"live {name[5:]}", _python("pytest", "-q", f"tests/integration/{name}.py"), environment)
        for name in names
    ]


def _rollout(preset: str, setting: GpuSetting) -> Piece:
    common = ["--out", str(setting.rows("rollout")), "--run-id", RUN_ID]
    if setting.rehearsal:
        few = ["--preset", "tiny", "--distribution", "lognormal", "--variants", "synchronous", "april-keep"]
        return Piece(f"{preset}/8", _python("bench.rollout", *common, *few))
    sizes = ["--preset", f"{preset}/8", "--budget-minutes", "8", "--gpu-gb", str(setting.gpu_gb)]
    where = ["--checkpoints", *map(str, setting.models), "--server-options", PLAIN]
    return Piece(f"{preset}/8", _python("bench.rollout", *common, *sizes, *where))


def _pace(setting: GpuSetting) -> Piece:
    """Step times of this GPU, as a table for --april-cpu-pace."""
    small = ["--rows", "1", "2", "--contexts", "16", "32"]
    sizes = small if setting.rehearsal else ["--model", str(setting.models[0])]
    return Piece("pace", _python("bench.pace", "measure", "--out", str(setting.folder / "pace.json"), *sizes))
