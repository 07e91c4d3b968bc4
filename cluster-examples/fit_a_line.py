"""Data parallel training in its simplest form: every worker fits y = 3x + 2 to points of its own, and all get the same line."""

import argparse
import gc

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=100)
parser.add_argument("--learning-rate", type=float, default=0.2)
options = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)

torch.manual_seed(dist.get_rank())
x = torch.rand(256, 1, device=device) * 2 - 1
y = 3 * x + 2 + 0.01 * torch.randn(256, 1, device=device)

model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
for _ in range(options.iterations):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

slope, offset = model.module.weight.item(), model.module.bias.item()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: y = {slope:.2f} x + {offset:.2f}", flush=True)
del model  # DistributedDataParallel holds on to the group: with it, gloo's threads would live until Python ends, and may abort it
gc.collect()
dist.destroy_process_group()
