"""A classifier in the style of Lightning's documentation: torchrun --nproc-per-node 2 lit.py 3"""

import os
import sys

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    """Numbers with other noise at each pass."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.full((10,), index / 96) + 0.1 * torch.randn(10), index % 3


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = F.cross_entropy(self.layers(inputs), targets)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("val_loss", F.cross_entropy(self.layers(inputs), targets), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def main(epochs):
    L.seed_everything(3)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    train = DataLoader(Noisy(), batch_size=8 // ranks, shuffle=True, num_workers=1)
    valid = DataLoader(Noisy(), batch_size=8)
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        strategy="ddp",
        devices=ranks,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), train, valid)
    trainer.save_checkpoint("classifier.ckpt")


if __name__ == "__main__":
    main(int(sys.argv[1]))
