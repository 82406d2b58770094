"""The quickstart as a bare PyTorch loop: the same digits, net, optimizer, batch, epochs and final test.

python benchmarks/peers/bare_digits.py
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from models.small_cnn import SmallCNN

EPOCHS, BATCH, TEST = 20, 64, 297


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div_(8).sub_(1).unsqueeze(1)
    labels = torch.from_numpy(digits.target)
    train, test = torch.utils.data.random_split(range(len(labels)), [len(labels) - TEST, TEST])
    train, test = torch.tensor(list(train)), torch.tensor(list(test))
    net = SmallCNN(10, 8, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(EPOCHS):
        net.train()
        for index in train[torch.randperm(len(train))].split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(net(images[index]), labels[index]).backward()
            optimizer.step()
    net.eval()
    with torch.no_grad():
        hits = (net(images[test]).argmax(1) == labels[test]).float().mean()
    print(f"accuracy {hits.item():.4f}")


if __name__ == "__main__":
    main()
