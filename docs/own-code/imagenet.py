"""A classifier in the style of PyTorch's ImageNet example: torchrun --nproc-per-node 2 imagenet.py --epochs 4"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("-b", "--batch-size", type=int, default=32, help="of all ranks together")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--seed", type=int)


class Pictures(Dataset):
    """Stands for ImageFolder: pictures that are cropped and flipped at random."""

    def __init__(self, length, augmented):
        self.length, self.augmented = length, augmented

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        picture = torch.full((3, 16, 16), (index % 7) / 7.0)
        picture[:, : index % 16] += 0.3
        if self.augmented:
            top, left = torch.randint(3, (2,)).tolist()
            picture = picture[:, top : top + 14, left : left + 14]
            if torch.rand(()) < 0.5:
                picture = picture.flip(2)
        return picture[:, :14, :14], index % 7


class AverageMeter:
    """Computes and stores the average."""

    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum, self.count = self.sum + value * n, self.count + n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def main():
    args = parser.parse_args()
    if args.seed is not None:
        torch.manual_seed(args.seed)
    dist.init_process_group()
    world_size = dist.get_world_size()

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(128, 7),
    )  # fmt: skip
    model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)

    train_dataset, val_dataset = Pictures(256, augmented=True), Pictures(64, augmented=False)
    batch_size = args.batch_size // world_size
    train_sampler = DistributedSampler(train_dataset)
    train_loader = DataLoader(train_dataset, batch_size, sampler=train_sampler, num_workers=args.workers)
    val_loader = DataLoader(val_dataset, batch_size)
    best_acc1 = 0.0

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch)
        acc1 = validate(val_loader, model)
        scheduler.step()
        best_acc1 = max(acc1, best_acc1)
    print(f"best accuracy: {best_acc1:.3f}")
    dist.destroy_process_group()


def train(train_loader, model, criterion, optimizer, epoch):
    losses, batch_time = AverageMeter(), AverageMeter()
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % 4 == 0:
            print(f"epoch {epoch} [{i}/{len(train_loader)}] time {batch_time.avg:.3f} loss {losses.avg:.3f}")


def validate(val_loader, model):
    top1 = AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            correct = (model(images).argmax(1) == target).float().mean()
            top1.update(correct.item(), images.size(0))
    return top1.avg


if __name__ == "__main__":
    main()
