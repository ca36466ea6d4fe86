"""A trainer in the style of PyTorch's DDP tutorial: torchrun --nproc-per-node 2 ddp.py EPOCHS"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every):
        self.rank = int(os.environ["RANK"])
        self.model = DistributedDataParallel(model)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def run_epoch(self, epoch):
        print(f"[rank {self.rank}] epoch {epoch}, {len(self.train_data)} batches")
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self.run_batch(source, targets)

    def save_snapshot(self, epoch):
        torch.save({"model": self.model.module.state_dict(), "epoch": epoch}, "snapshot.pt")

    def train(self, epochs):
        for epoch in range(epochs):
            self.run_epoch(epoch)
            if self.rank == 0 and epoch % self.save_every == 0:
                self.save_snapshot(epoch)


def main(epochs):
    dist.init_process_group()
    torch.manual_seed(1)
    data = TensorDataset(torch.rand(256, 20), torch.randint(5, (256,)))
    model = torch.nn.Linear(20, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
    trainer = Trainer(model, loader, optimizer, save_every=2)
    trainer.train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
