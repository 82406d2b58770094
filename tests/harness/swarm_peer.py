"""One hivemind peer that learns the digits, as a process: python swarm_peer.py EPOCHS CACHE_DIR
[ADDRESS].
"""

import functools
import json
import logging
import sys
import time
import warnings


def main(epochs: int, cache_dir: str, initial_peers: list[str]) -> None:
    import lightning.pytorch as pl
    import torch

    from data.digits import DigitsDataModule
    from lockstep.process.output import configure_logging
    from models.small_cnn import SmallCNN
    from strategies.hivemind import Hivemind
    from tasks.classifier import ImageClassifier

    configure_logging()  # the addresses are logged
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = DigitsDataModule(global_batch_size=256, cache_dir=cache_dir)
    data.prepare()
    data.attach_to_ranks(accumulate_grad_batches=4)
    net = SmallCNN(num_classes=10, image_size=8, channels=1)
    module = ImageClassifier(net, functools.partial(torch.optim.AdamW, lr=0.01), num_classes=10)

    class AsSlowAsARealNet(pl.Callback):
        """So that the first peer is not done before the second has imported torch."""

        def on_train_batch_start(self, *_):
            time.sleep(0.25)

    strategy = Hivemind("cpu", initial_peers, swarm="test", matchmaking_time_s=1.0)
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, callbacks=[AsSlowAsARealNet()], max_epochs=epochs,
        accumulate_grad_batches=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    weights = float(sum(parameter.detach().double().norm() for parameter in net.parameters()))
    accuracy = float(trainer.callback_metrics["test/acc"])
    print(
        json.dumps({"accuracy": accuracy, "weights": weights, **strategy.record_fields()}),
        flush=True,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
