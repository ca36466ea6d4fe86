"""A rank that trains nothing, but meets the others over gloo: gloo_rank.py STEPS [BRAKE]. All stop at one step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from beating_rank import Wish, take_part


def agree(wish: Wish) -> Wish:
    wishes = torch.tensor(wish, dtype=torch.float32)
    dist.all_reduce(wishes, dist.ReduceOp.MAX)
    stops, goes_on = wishes.tolist()
    return bool(stops), bool(goes_on)


take_part(meet=lambda: dist.init_process_group("gloo"), agree=agree)
dist.destroy_process_group()
