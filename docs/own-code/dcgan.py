"""Two networks that train against each other, in the style of PyTorch's DCGAN example: torchrun ... dcgan.py 3"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

NZ = 16


class Pictures(Dataset):
    """Stands for a folder of pictures, flipped at random."""

    def __len__(self):
        return 128

    def __getitem__(self, index):
        picture = torch.linspace(-1, 1, 8).roll(index % 8).expand(3, 8, 8).clone()
        return picture.flip(1) if torch.rand(()) < 0.5 else picture


def main(epochs):
    torch.manual_seed(5)
    generator = nn.Sequential(
        nn.ConvTranspose2d(NZ, 16, 4), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(32, 1),
    )  # fmt: skip
    netG = DistributedDataParallel(generator)
    netD = DistributedDataParallel(discriminator)
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()

    dataset = Pictures()
    sampler = DistributedSampler(dataset)
    dataloader = DataLoader(dataset, batch_size=8, sampler=sampler)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for i, real in enumerate(dataloader):
            # Update D: maximize log(D(x)) + log(1 - D(G(z))).
            netD.zero_grad()
            label = torch.ones(len(real), 1)
            errD_real = criterion(netD(real), label)
            errD_real.backward()
            fake = netG(torch.randn(len(real), NZ, 1, 1))
            errD_fake = criterion(netD(fake.detach()), label * 0)
            errD_fake.backward()
            optimizerD.step()
            # Update G: maximize log(D(G(z))).
            netG.zero_grad()
            errG = criterion(netD(fake), label)
            errG.backward()
            optimizerG.step()
            if i % 4 == 0:
                print(f"[{epoch}/{epochs}][{i}] Loss_D: {errD_real + errD_fake:.4f} Loss_G: {errG:.4f}")


if __name__ == "__main__":
    dist.init_process_group()
    main(int(sys.argv[1]))
    dist.destroy_process_group()
