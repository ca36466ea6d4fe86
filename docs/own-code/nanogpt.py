"""A language model in the style of nanoGPT's train.py: torchrun --nproc-per-node 2 nanogpt.py 40"""

import math
import os
import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

max_iters = int(sys.argv[1])
eval_interval, eval_iters, log_interval = 10, 2, 10
gradient_accumulation_steps, batch_size, block_size = 4, 4, 16
learning_rate, warmup_iters, min_lr, grad_clip = 1e-2, 5, 1e-3, 1.0

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group()
    ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master_process, seed_offset = ddp_rank == 0, ddp_rank
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process, seed_offset = True, 0
torch.manual_seed(1337 + seed_offset)

text = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 20
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
splits = {"train": data[: len(data) * 9 // 10], "val": data[len(data) * 9 // 10 :]}


def get_batch(split):
    source = splits[split]
    ix = torch.randint(len(source) - block_size, (batch_size,))
    x = torch.stack([source[i : i + block_size] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class GPT(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(letters), width), nn.Embedding(block_size, width)
        self.drop = nn.Dropout(0.1)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(width, len(letters), bias=False)

    def forward(self, idx, targets):
        t = idx.size(1)
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(t)))
        logits = self.lm_head(self.block(x, nn.Transformer.generate_square_subsequent_mask(t)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model


@torch.no_grad()
def estimate_loss():
    model.eval()
    out = {split: sum(model(*get_batch(split))[1].item() for _ in range(eval_iters)) / eval_iters for split in splits}
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


iter_num, best_val_loss = 0, 1e9
X, Y = get_batch("train")
while True:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        if losses["val"] < best_val_loss and master_process:
            best_val_loss = losses["val"]
            print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
    for micro_step in range(gradient_accumulation_steps):
        with model.no_sync() if ddp and micro_step < gradient_accumulation_steps - 1 else nullcontext():
            logits, loss = model(X, Y)
            (loss / gradient_accumulation_steps).backward()
        X, Y = get_batch("train")
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}")
    iter_num += 1
    if iter_num > max_iters:
        break
if ddp:
    destroy_process_group()
