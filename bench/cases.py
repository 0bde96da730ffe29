"""The cases that are timed, by group."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead.core.masks import Everything, Mask, causal, documents, everything, prefix, window
from clearhead.core.problem.problem import Problem


@dataclass(frozen=True)
class Case:
    name: str
    B: int = 1
    H: int = 8
    G: int = 8
    Tq: int = 2048
    Tk: int = 2048
    D: int = 64
    dtype: torch.dtype = torch.float32
    mask: Mask = field(default=everything)
    threads: int | None = None  # None means as many as the run has
    training: bool = False  # forward and backward: gradients of q, k and v

    @property
    def decode(self) -> bool:
        return self.Tq == 1

    @property
    def masked(self) -> bool:
        return not isinstance(self.mask, Everything)

    @property
    def tiny(self) -> bool:
        return self.Tq * self.Tk < 10_000 and not self.decode

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        source = torch.Generator().manual_seed(0)
        shapes = ((self.H, self.Tq), (self.G, self.Tk), (self.G, self.Tk))
        q, k, v = (
            torch.empty(self.B, heads, length, self.D, dtype=self.dtype)
            .normal_(generator=source)
            for heads, length in shapes
        )  # fmt: skip
        return tuple(x.requires_grad_(self.training) for x in (q, k, v))  # type: ignore[return-value]  # three of them

    def work(self, problem: Problem) -> float:
        """The work that a rate counts: the bytes of decoding, or else the operations.

        The forward pass has two matrix products, and the backward pass five.
        """
        if self.decode:
            return problem.bytes
        return problem.flops * (3.5 if self.training else 1)


def documents_of(count: int = 64, tokens: int = 16384) -> Mask:
    cuts = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(3))[: count - 1] + 1
    starts = torch.zeros(tokens, dtype=torch.long)
    starts[cuts] = 1
    return documents(starts.cumsum(0))


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

PREFILL = [
    Case("fp32 full"),
    Case("fp32 causal", mask=causal),
    Case("fp32 D=80 odd lengths", Tq=1999, Tk=2017, D=80),
    Case("fp32 D=128 grouped", H=32, G=8, Tq=1024, Tk=1024, D=128),
    Case("fp32 D=128 grouped causal", H=32, G=8, Tq=1024, Tk=1024, D=128, mask=causal),
    Case("bf16 full", dtype=BF16),
    Case("bf16 D=128 grouped causal", H=32, G=8, Tq=1024, Tk=1024, D=128, dtype=BF16, mask=causal),
    Case("fp16 full", dtype=F16),
]
MASKED = [
    Case("fp32 window 512 of 8192", Tq=8192, Tk=8192, mask=window(before=511, after=0)),
    Case(
        "fp32 window 512 and sink 4 of 8192",
        Tq=8192,
        Tk=8192,
        mask=causal & (window(before=511, after=0) | prefix(4)),
    ),
    Case("fp32 64 documents in 16k", H=2, G=2, Tq=16384, Tk=16384, mask=documents_of()),
]
DECODE = [
    Case(
        f"decode {str(t)[6:]} B={B} H=32 G={G} Tk={Tk}", B=B, H=32, G=G, Tq=1, Tk=Tk, D=128, dtype=t
    )
    for t in (F32, BF16, F16)
    for B, G, Tk in ((1, 32, 4096), (1, 8, 1024), (1, 8, 65536), (8, 8, 4096), (8, 32, 1024))
]
TRAINING = [
    Case("training fp32 full", training=True),
    Case("training fp32 causal", training=True, mask=causal),
    Case("training fp32 D=128 grouped causal", training=True, H=32, G=8, Tq=1024, Tk=1024, D=128,
         mask=causal),
    Case("training bf16 full", training=True, dtype=BF16),
    Case("training bf16 D=128 grouped causal", training=True, H=32, G=8, Tq=1024, Tk=1024, D=128,
         dtype=BF16, mask=causal),
]  # fmt: skip
TINY = [
    Case("tiny 1,1,5,4", H=1, G=1, Tq=5, Tk=5, D=4),
    Case("tiny 1,12,32,64", H=12, G=12, Tq=32, Tk=32),
]
SHORT_TRAINING = [
    Case(f"training fp32 4 x {H} heads on {G}, {S} tokens causal", B=4, H=H, G=G, Tq=S, Tk=S,
         mask=causal, training=True)
    for H, G in ((12, 12), (12, 3)) for S in (16, 32, 64)
]  # fmt: skip
LENGTHS = [
    Case(f"fp32 {name}S={s}", Tq=s, Tk=s, mask=mask)
    for name, mask in (("", everything), ("causal ", causal))
    for s in (128, 256, 512, 1024, 2048, 4096, 8192)
]
HEADS = [Case(f"fp32 H={h}", H=h, G=h, Tq=1024, Tk=1024) for h in (1, 2, 4, 8, 16, 32)]
SIZES = [Case(f"fp32 D={d}", Tq=1024, Tk=1024, D=d) for d in (16, 32, 64, 80, 96, 128, 192, 256)]
DTYPES = [
    Case(f"{str(t)[6:]} causal", Tq=4096, Tk=4096, dtype=t, mask=causal) for t in (F32, BF16, F16)
]


def thread_cases(most: int) -> list[Case]:
    counts = sorted({1, most} | {2**i for i in range(1, most.bit_length()) if 2**i < most})
    return [Case(f"fp32 full, {n} threads", threads=n) for n in counts]


GROUPS: dict[str, list[Case]] = {
    "prefill": PREFILL, "masked": MASKED, "decode": DECODE, "tiny": TINY, "training": TRAINING,
    "short-training": SHORT_TRAINING,
    "lengths": LENGTHS, "heads": HEADS, "sizes": SIZES, "dtypes": DTYPES,
}  # fmt: skip
