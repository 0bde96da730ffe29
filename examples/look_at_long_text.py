"""Look at the heads of a layer on a long text that is split over processes.

    torchrun --nproc-per-node 2 examples/look_at_long_text.py --tokens 8192

It prints, for each head, the effective number of keys of a query, and its weight on the first
tokens and on the nearest ones. The numbers are those of one machine; no process has the full text.
"""

import argparse

import torch
import torch.distributed as dist

import clearhead as ch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=4)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    layout = ch.distributed.head_tail(options.tokens, dist.get_world_size())
    own = layout.positions[dist.get_rank()]
    # Every process makes its own tokens, from their positions alone.
    rows = [torch.Generator().manual_seed(position) for position in own.tensor().tolist()]
    q, k, v = (
        torch.stack([torch.randn(options.heads, 32, generator=row) for row in rows], 1)
        for _ in range(3)
    )
    groups = ch.mass({"the first 4": ch.prefix(4), "the last 64": ch.window(before=63, after=0)})
    seen = ch.distributed.look(
        q, k, v, mask=ch.causal, bias=ch.alibi(), layout=layout, stats=["effective", groups]
    )
    numbers = torch.stack([seen.effective, *seen.mass.values()]).sum(-1) / options.tokens
    dist.all_reduce(numbers)
    if dist.get_rank() == 0:
        for head, (keys, first, last) in enumerate(numbers.T.tolist()):
            print(f"head {head}  {keys:8.1f} keys  first 4 {first:.3f}  last 64 {last:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
