"""Which build of PyTorch fits a driver and its GPUs."""

import pytest

from lockstep.process import gpu_builds
from lockstep.process.errors import UserError
from lockstep.process.gpu_builds import Card, Machine, choose_wheel_tag, has_kernels, read_machine

# torch.cuda.get_arch_list() of torch 2.14.1+cu130
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (CU130, (7, 0), False),
        (CU130, (7, 5), True),
        # Kernels run on the same major version and a later minor one.
        (CU130, (8, 9), True),
        (CU130, (12, 1), True),
        (CU130, (11, 0), False),
        (["sm_86"], (8, 0), False),
        # PTX is compiled for every later GPU.
        (["sm_80", "compute_80"], (13, 0), True),
        (["compute_120"], (9, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_90a"], (9, 1), False),
        ([], (8, 0), False),
        (["gfx942"], (9, 4), False),
    ],
)
def test_a_build_runs_on_a_gpu_with_its_kernels(architectures, capability, runs):
    assert has_kernels(architectures, capability) == runs


@pytest.mark.parametrize(
    ("driver", "capabilities", "device"),
    [
        ("580.95.05", [(9, 0)], "cu130"),
        ("580.95.05", [(12, 0), (7, 5)], "cu130"),
        ("580.95.05", [(7, 0)], "cu126"),
        # One build serves all GPUs of a machine.
        ("595.10", [(9, 0), (6, 1)], "cu126"),
        ("535.54.03", [(8, 0)], "cu126"),
    ],
)
def test_auto_takes_the_newest_build_that_driver_and_gpus_allow(driver, capabilities, device):
    cards = [Card("card", capability) for capability in capabilities]
    assert choose_wheel_tag(Machine(driver, cards)) == device


@pytest.mark.parametrize(
    ("driver", "capability", "said"),
    [
        ("570.10", (12, 0), "driver 570.10 is too old for card .capability 12.0.: install 580"),
        ("470.10", (8, 0), "too old .* install 525"),
        ("580.10", (3, 5), "No build .*capability 3.5.: .*DEVICE=cpu"),
    ],
)
def test_a_machine_without_a_build_is_told_what_to_do(driver, capability, said):
    with pytest.raises(UserError, match=said):
        choose_wheel_tag(Machine(driver, [Card("card", capability)]))


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A function that lets nvidia-smi print a text and end with a code."""

    def write(text, code=0):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\ncat <<'E'\n{text}\nE\nexit {code}\n")
        path.chmod(0o755)
        monkeypatch.setattr(gpu_builds, "SMI_COMMAND", (str(path),))

    return write


def test_nvidia_smi_tells_driver_and_gpus(smi):
    smi("535.54.03, 7.0, Tesla V100-SXM2-16GB\n535.54.03, 8.9, NVIDIA L4")
    machine = read_machine()
    assert machine.driver == "535.54.03"
    assert machine.cards == [Card("Tesla V100-SXM2-16GB", (7, 0)), Card("NVIDIA L4", (8, 9))]


def test_a_broken_nvidia_smi_is_quoted(smi):
    smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9)
    with pytest.raises(UserError, match="couldn't communicate .* DEVICE=cpu"):
        read_machine()


@pytest.mark.parametrize("line", ["535.54.03, [N/A], NVIDIA L4", "[N/A], 8.9, NVIDIA L4"])
def test_a_gpu_without_a_capability_is_quoted(line, smi):
    smi(f"535.54.03, 8.9, NVIDIA L4\n{line}")
    with pytest.raises(UserError, match="cannot list GPUs .*N/A.*DEVICE=cpu"):
        read_machine()


@pytest.mark.parametrize("has_driver", [False, True])
def test_without_nvidia_smi_the_drivers_files_decide(has_driver, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_builds, "SMI_COMMAND", (str(tmp_path / "none"),))
    monkeypatch.setattr(gpu_builds, "DRIVER_FILES", (str(tmp_path),) if has_driver else ())
    if has_driver:
        with pytest.raises(UserError, match="nvidia-smi does not answer .* DEVICE=cu130"):
            read_machine()
    else:
        assert read_machine() is None


def test_auto_prints_the_word_and_says_why(smi, capsys):
    smi("580.10, 7.0, Tesla V100-SXM2-16GB")
    assert gpu_builds.main() == 0
    output = capsys.readouterr()
    assert output.out == "cu126\n"
    assert "chose cu126: driver 580.10, Tesla V100-SXM2-16GB (capability 7.0)" in output.err
