"""Train a small decoder on one long text that is split over processes.

    torchrun --nproc-per-node 2 examples/train_long_text.py --tokens 4096

The losses are the same for any number of processes. --limit-mb limits the memory that each process
may allocate after training begins, to show a length that two processes can hold and one cannot.
"""

import argparse
import resource
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from storyteller.grammar import story
from torch import nn

import clearhead as ch


class Decoder(nn.Module):
    """Bytes (B, T) -> logits for the next byte, (B, T, 256)."""

    def __init__(self, d: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = ch.nn.TokenEmbedding(256, d)
        self.blocks = nn.ModuleList(
            ch.nn.TransformerBlock(
                d, heads, kv_heads=2, causal=True, rotary=ch.nn.RotaryPositions(d // heads)
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(d, 256, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def long_text(tokens: int) -> torch.Tensor:
    """Return consecutive stories as bytes, (1, tokens)."""
    text, number = b"", 0
    while len(text) < tokens:
        text += f"{story(0, number)} ".encode()
        number += 1
    return torch.tensor([list(text[:tokens])])


def limit_memory(megabytes: int) -> None:
    """Limit the memory that this process may allocate beyond its present memory."""
    status = Path("/proc/self/status").read_text()
    has = next(int(line.split()[1]) * 1024 for line in status.splitlines() if "VmData" in line)
    resource.setrlimit(resource.RLIMIT_DATA, (has + megabytes * 2**20,) * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layout", default="head-tail")
    parser.add_argument("--limit-mb", type=int)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # every process begins with the same weights
    model = Decoder()
    steps = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = long_text(options.tokens + 1)
    ids, labels = text[:, :-1], text[:, 1:]
    if options.limit_mb is not None:
        limit_memory(options.limit_mb)

    for step in range(options.steps):
        with ch.distributed.sharded(options.tokens, layout=options.layout) as part:
            logits = model(part.shard(ids))
            own_labels = part.shard(labels)
        loss = F.cross_entropy(logits.flatten(0, 1), own_labels.flatten(), reduction="sum")
        loss = loss / options.tokens
        steps.zero_grad()
        loss.backward()
        for weight in model.parameters():  # the sum of the gradients of all processes' tokens
            dist.all_reduce(weight.grad)
        steps.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {float(total):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
