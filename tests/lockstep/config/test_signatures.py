"""What the source says of parameters is what Python says once it is imported."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config.compose import CONFIGS
from lockstep.config.instantiate import options_of, resolve_target
from lockstep.config.signatures import Signature, signature_of

SRC = Path(__file__).resolve().parents[3] / "src"
NAMED = {name for path in CONFIGS.glob("[!h]*/*.yaml") for name in re.findall(r"_target_: ([\w.]+)", path.read_text())}


@pytest.mark.parametrize("target", sorted(NAMED) + ["lightning.pytorch.callbacks.EarlyStopping"])
def test_the_source_tells_what_the_import_tells(target):
    parameters, any_name = options_of(resolve_target(target, "x"))
    found = signature_of(target)
    wanted = {name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
    assert found is not None and found.any_name == any_name
    # of another library's class that takes any name, the source also tells its bases' names
    assert set(found.names) == wanted or (any_name and set(found.names) > wanted and target.startswith("torchmetrics."))


def test_torch_is_not_imported_for_it():
    code = (
        "import sys; from lockstep.config.signatures import signature_of as of; "
        "assert 'lr' in of('torch.optim.AdamW').names and 'max_epochs' in of('lightning.pytorch.Trainer').names; "
        "assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=SRC, check=True)


def test_of_a_base_in_another_file_by_another_name(tmp_path, monkeypatch):
    (tmp_path / "lockstep_below.py").write_text("class Base:\n    def __init__(self, far=1, **more): ...\n")
    (tmp_path / "lockstep_above.py").write_text(
        "import lockstep_below as b\nfrom lockstep_below import Base as Other\n"
        "class Mine(b.Base):\n    def __init__(self, near, *, own=2, **options): ...\n"
        "class Plain(Other): ...\nclass Empty: ...\ndef call(a, /, b, *, c): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert signature_of("lockstep_above.Mine") == Signature(("near", "own", "far"), True)
    assert signature_of("lockstep_above.Plain") == Signature(("far",), True)
    assert signature_of("lockstep_above.Empty") == Signature((), False)
    assert signature_of("lockstep_above.call") == Signature(("a", "b", "c"), False)
    assert signature_of("lockstep_above.Nothing") is None and signature_of("nowhere.x") is None
