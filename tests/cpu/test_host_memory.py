"""Host memory is asked for before it is taken: what the kernel says, what the user says, and what a refusal leaves."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_offload import OffloadPolicy, offload_optimizer, remove_offload
from fsdp_offload.device import host_limits as host_memory
from fsdp_offload.device.host_limits import HostMemory, check_host_memory
from tests.parity import params_of

GB = 10**9


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def meminfo(total_bytes: int, available_bytes: int) -> dict[str, str]:
    lines = (f"MemTotal: {total_bytes // 1024} kB", "MemFree: 5 kB", f"MemAvailable: {available_bytes // 1024} kB")
    return {"proc/meminfo": "\n".join(lines) + "\nHugePages_Total: 0\n"}


def v2(path: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup/{path}".rstrip("/")
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {cache}\nactive_file 7\n",
    }


def v1(path: str, limit: int, used: int, cache: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory/{path}".rstrip("/")
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"cache 9\ninactive_file 1\ntotal_inactive_file {cache}\n",
    }


MACHINE = meminfo(1024 * GB, 512 * GB)


def self_cgroup(text: str) -> dict[str, str]:
    return MACHINE | {"proc/self/cgroup": text}


PARENTS = v2("slurm/job_1/step_0", "max", 10 * GB) | v2("slurm/job_1", str(200 * GB), 150 * GB)
V1_OF_HOST = v1("docker/a", 48 * GB, 40 * GB, cache=8 * GB) | v1("", 9_223_372_036_854_771_712, 300 * GB)
V1_LINES = "12:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n1:name=systemd:/docker/a\n"
CASES = {
    "without cgroups": (MACHINE, HostMemory(1024 * GB, 512 * GB)),
    # A container sees its own cgroup as the root.
    "of a container": (self_cgroup("0::/\n") | v2("", str(64 * GB), 24 * GB), HostMemory(64 * GB, 40 * GB)),
    "page cache is free": (
        self_cgroup("0::/\n") | v2("", str(64 * GB), 60 * GB, cache=30 * GB),
        HostMemory(64 * GB, 34 * GB),
    ),
    "every parent limits": (
        self_cgroup("0::/slurm/job_1/step_0\n") | PARENTS | v2("slurm", str(100 * GB), 20 * GB),
        HostMemory(100 * GB, 50 * GB),
    ),
    "the machine is the tightest": (
        self_cgroup("0::/\n") | meminfo(32 * GB, 8 * GB) | v2("", str(64 * GB), 0),
        HostMemory(32 * GB, 8 * GB),
    ),
    "no limit": (self_cgroup("0::/a\n") | v2("a", "max", 10 * GB), HostMemory(1024 * GB, 512 * GB)),
    "over its limit": (self_cgroup("0::/\n") | v2("", str(64 * GB), 65 * GB), HostMemory(64 * GB, 0)),
    "version 1": (self_cgroup(V1_LINES) | V1_OF_HOST, HostMemory(48 * GB, 16 * GB)),
    # The path is the host's, and only the container's own cgroup is mounted.
    "version 1 in a container": (
        self_cgroup("4:memory:/docker/a\n") | v1("", 48 * GB, 40 * GB),
        HostMemory(48 * GB, 8 * GB),
    ),
    "both versions": (self_cgroup("4:memory:/a\n0::/a\n") | v1("a", 48 * GB, 0), HostMemory(48 * GB, 48 * GB)),
    "a limit without its companions": (
        self_cgroup("0::/\n") | {"sys/fs/cgroup/memory.max": f"{64 * GB}\n"},
        HostMemory(64 * GB, 64 * GB),
    ),
    **{
        f"gone: {path!r}": (self_cgroup(f"0::{path}\n\nnonsense\n"), HostMemory(1024 * GB, 512 * GB))
        for path in ("/gone", "/../outside", "", "/a/../../..")
    },
}


@pytest.mark.parametrize(("files", "expected"), CASES.values(), ids=CASES)
def test_what_the_kernel_says(files: dict[str, str], expected: HostMemory, tmp_path: Path) -> None:
    assert host_memory.host_memory(tree(tmp_path, files)) == expected


def test_this_machine_has_some() -> None:
    memory = host_memory.host_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "fits", "limit", "says"),
    [
        ("1", 60, None, ["needs 61 bytes of host memory on this rank; 60 are available", "host_limit_bytes"]),
        ("4", 25, None, ["26 bytes ", " each of the 4 ranks of this host, 104 in all; the limit is 100"]),
        ("4", 1000, 1000, ["needs 1001 bytes ", "host_limit_bytes allows 1000"]),
    ],
    ids=["what is available", "shared by ranks", "the user knows better"],
)
def test_more_than_there_is_is_refused(
    ranks: str, fits: int, limit: int | None, says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "host_memory", lambda: HostMemory(100, 60))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    check_host_memory(fits, limit)
    with pytest.raises(MemoryError) as error:
        check_host_memory(fits + 1, limit)
    assert [words for words in (*says, "more ranks") if words not in str(error.value)] == []


# What a refusal leaves -----------------------------------------------------------------------------------------------

NUMEL = 1000
STATE_BYTES = 2 * 4032  # of AdamW, each tensor padded to 64 bytes


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, NUMEL))


def train(optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.linspace(step, 1, param.numel())
        optimizer.step()


def fitting(nbytes: int) -> OffloadPolicy:
    return OffloadPolicy(host_limit_bytes=nbytes)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_optimizer_that_does_not_fit_stays_plain_and_trains(
    monkeypatch: pytest.MonkeyPatch, steps_before: int
) -> None:
    ours, theirs = parameter(), parameter()
    optimizer, plain = torch.optim.AdamW([ours]), torch.optim.AdamW([theirs])
    train(optimizer, steps_before)
    before = {name: value for state in optimizer.state.values() for name, value in state.items()}
    with monkeypatch.context() as patch:
        patch.setattr("fsdp_offload.engine.homes.Region", None)  # nothing is taken
        with pytest.raises(MemoryError, match=f"needs {STATE_BYTES} bytes"):
            offload_optimizer(optimizer, policy=fitting(STATE_BYTES - 1))
    assert type(optimizer) is torch.optim.AdamW
    assert all(optimizer.state[ours][name] is value for name, value in before.items())
    train(optimizer, 3)
    train(plain, steps_before)
    train(plain, 3)
    assert torch.equal(ours, theirs)
    offload_optimizer(optimizer, policy=fitting(STATE_BYTES))
    assert optimizer.offload_report().memory.host_bytes == STATE_BYTES
    train(optimizer, 1)
    remove_offload(optimizer)
    assert optimizer.state[ours]["step"] == steps_before + 4


def test_a_group_that_does_not_fit_is_not_added() -> None:
    ours = parameter()
    optimizer = offload_optimizer(torch.optim.AdamW([ours]), policy=fitting(STATE_BYTES))
    train(optimizer, 2)
    with pytest.raises(MemoryError, match="host_limit_bytes"):
        optimizer.add_param_group({"params": [parameter()]})  # which alone would fit
    assert len(optimizer.param_groups) == 1
    train(optimizer, 1)
    assert optimizer.state[ours]["step"] == 3


def sgd(*momenta: float) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [parameter()], "momentum": momentum} for momentum in momenta], lr=0.1)


@pytest.mark.parametrize("how", ["switched on", "loaded"])
def test_state_that_grows_beyond_memory_is_not_lost(how: str) -> None:
    """Momentum wants a tensor for each parameter of its group."""
    optimizer, plain, larger = sgd(0.9, 0.0), sgd(0.9, 0.0), sgd(0.9, 0.9)
    offload_optimizer(optimizer, policy=fitting(STATE_BYTES // 2))
    for each in (optimizer, plain, larger):
        train(each, 2)
    group = optimizer.param_groups[1]

    def grow() -> None:
        if how == "loaded":
            optimizer.load_state_dict(larger.state_dict())
        group["momentum"] = 0.9
        train(optimizer, 1)

    for _ in range(2):
        with pytest.raises(MemoryError, match="host_limit_bytes"):
            grow()
        assert group["momentum"] == (0.9 if how == "switched on" else 0.0)
    group["momentum"] = 0.0
    train(optimizer, 2)
    train(plain, 2)
    assert all(torch.equal(*pair) for pair in zip(params_of(optimizer), params_of(plain), strict=True))


def test_a_check_costs_no_memory() -> None:
    """State of a terabyte is refused at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        huge = nn.Parameter(torch.empty(1).expand(1 << 37))
        with pytest.raises(MemoryError, match=f"needs {2 * 4 << 37} bytes"):
            offload_optimizer(torch.optim.AdamW([huge]))
