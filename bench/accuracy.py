"""Print the largest errors of attention and its gradients, by dtype and instruction set.

    python bench/accuracy.py > docs/accuracy.md

The output is a table in Markdown: the largest distance from float64, for each instruction-set level
of this machine and for plain torch, on the same tensors.
"""

import torch

import clearhead as ch
from clearhead.core.engines.cpu import extension

B, H, T, D = 1, 4, 1024, 64


def eager(q, k, v):
    scores = q @ k.mT / D**0.5
    hidden = ~torch.ones(T, T, dtype=torch.bool).tril()
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def results(attention, inputs, dout):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def errors(found, right):
    return [float((a.double() - b).abs().max()) for a, b in zip(found, right, strict=True)]


def main() -> None:
    torch.manual_seed(0)
    drawn = [torch.randn(B, H, T, D, dtype=torch.float64) for _ in range(4)]
    print("| dtype | computed by | output | dq | dk | dv |\n|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        *inputs, dout = (x.to(dtype) for x in drawn)
        right = results(eager, [x.double() for x in inputs], dout.double())
        rows = {"plain torch": results(eager, inputs, dout)}
        for level, *_ in reversed([it for it in extension.core.levels() if it[2]]):
            extension.use_level(level)
            rows[level] = results(
                lambda *x: ch.attention(*x, mask=ch.causal, engine="cpu"), inputs, dout
            )
        extension.use_level()
        for name, found in rows.items():
            cells = " | ".join(f"{error:.1e}" for error in errors(found, right))
            print(f"| {str(dtype)[6:]} | {name} | {cells} |")


if __name__ == "__main__":
    main()
