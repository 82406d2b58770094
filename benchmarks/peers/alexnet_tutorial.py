"""The AlexNet on CIFAR-10 recipe of the data-parallel SLURM tutorials, written as they write it, for one process.

    python benchmarks/peers/alexnet_tutorial.py --root FOLDER [--workers N]

torchvision's CIFAR10, Resize 70, RandomCrop 64, mean and std 0.5, batch 256, SGD with momentum 0.9 and lr 0.1, 10 % of
the training set for validation after every epoch, running loss and accuracy read with .item() in every step.
--images shortens the epoch for a benchmark, both parts alike.
"""

import argparse
import time

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Subset, random_split
from torchvision import datasets, models, transforms


def train(model, device, loader, criterion, optimizer):
    model.train()
    running_loss, correct, total = 0.0, 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item() * labels.size(0)
        _, predicted = outputs.max(1)
        total += labels.size(0)
        correct += predicted.eq(labels).sum().item()
    return running_loss / total, correct / total


def validate(model, device, loader, criterion):
    model.eval()
    running_loss, correct, total = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            outputs = model(images)
            running_loss += criterion(outputs, labels).item() * labels.size(0)
            _, predicted = outputs.max(1)
            total += labels.size(0)
            correct += predicted.eq(labels).sum().item()
    return running_loss / total, correct / total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="holds cifar-10-batches-py")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=50_000)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    normalize = transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    train_transform = transforms.Compose(
        [transforms.Resize((70, 70)), transforms.RandomCrop((64, 64)), transforms.ToTensor(), normalize]
    )
    # Files rebuilt from the same pixels have other checksums.
    datasets.CIFAR10._check_integrity = datasets.CIFAR10._load_meta = lambda self: True
    dataset = Subset(datasets.CIFAR10(args.root, train=True, transform=train_transform), range(args.images))
    num_val = args.images // 10
    train_set, val_set = random_split(dataset, [args.images - num_val, num_val])
    train_loader = DataLoader(train_set, 256, shuffle=True, num_workers=args.workers, pin_memory=device.type == "cuda")
    val_loader = DataLoader(val_set, 256, num_workers=args.workers, pin_memory=device.type == "cuda")
    model = models.AlexNet(num_classes=10).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(args.epochs):
        started = time.perf_counter()
        train_loss, train_accuracy = train(model, device, train_loader, criterion, optimizer)
        val_loss, val_accuracy = validate(model, device, val_loader, criterion)
        seconds = time.perf_counter() - started
        print(
            f"epoch {epoch + 1} seconds {seconds:.3f} images_per_s {args.images / seconds:.1f} "
            f"train {train_loss:.3f} {train_accuracy:.3f} val {val_loss:.3f} {val_accuracy:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
