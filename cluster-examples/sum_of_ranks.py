"""The smallest distributed program: every worker adds its rank to a sum that all of them get."""

import torch
import torch.distributed as dist

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
if torch.cuda.is_available():
    torch.cuda.set_device(dist.get_node_local_rank())
total = torch.tensor(float(dist.get_rank()), device="cuda" if torch.cuda.is_available() else "cpu")
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the ranks add up to {total.item():g}", flush=True)
dist.destroy_process_group()
