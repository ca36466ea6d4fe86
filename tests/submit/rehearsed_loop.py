"""A training loop with DDP, BatchNorm, accumulation, dropout and values that differ by rank."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cluster_ddp.train import join_run

with join_run() as run:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    data = TensorDataset(torch.randn(80, 4), torch.arange(80) % 2)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    kept = run.keep(losses=[], lowest=float("inf"))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    loader = run.resumable(loader, **parts, epochs=3, accumulate=2)
    for _ in loader.epochs():
        for number, (rows, labels) in loader.enumerate(1):
            loss = F.cross_entropy(model(rows), labels)
            loss.backward()
            kept.losses.append(loss.item())
            kept.lowest = min(kept.lowest, *kept.losses)
            if number % 2 == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
