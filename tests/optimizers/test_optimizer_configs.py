from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "optimizer"


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_each_option_builds_an_optimizer_that_steps_and_loads(name, tmp_path):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        needed = ["opt=lamb"] if name == "timm" else []
        factory = instantiate(compose(name, needed), _convert_="all")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    named = getattr(factory.func, "takes_named_parameters", False)
    optimizer = factory(net.named_parameters() if named else net.parameters())
    before = net(torch.ones(8, 4)).square().mean()
    before.backward()
    optimizer.step()
    assert net(torch.ones(8, 4)).square().mean() < before
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert len(saved["state"]) == 4 and saved["param_groups"][0]["lr"] == factory.keywords["lr"]
