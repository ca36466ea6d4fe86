"""A training loop of one's own, slow as long as a file exists: braked_loop.py BRAKE."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cluster_ddp.train import join_run

brake = Path(sys.argv[1])
with join_run() as run:
    torch.manual_seed(3)
    data = TensorDataset(torch.rand(160, 10), torch.randint(3, (160,)))
    layers = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    loader = run.resumable(loader, model=model, optimizer=optimizer, epochs=6)
    for _ in loader.epochs():
        for inputs, labels in loader:
            if brake.exists():
                time.sleep(0.5)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            run.log(run.step + 1, {"train/loss": float(loss)})
    print("after the loop", flush=True)
