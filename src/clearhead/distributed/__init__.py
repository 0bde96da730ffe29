"""Compute exact attention of one sequence on many ranks, with every mask, by torch.distributed.

Start a script with ``torchrun --nproc-per-node N script.py``, call
``torch.distributed.init_process_group("gloo")`` (NCCL on GPUs), cut tensors along the sequence with
`shard`, and call `attention` as on one machine. `plan` estimates the cost.
"""

from .attention import attention, shard, unshard
from .decode import decode
from .generate import generate
from .layouts import Layout, balanced, by_document, contiguous, head_tail
from .look import look
from .plan import Plan, plan
from .plan_model import plan_model
from .sharded import Shard, sharded
from .transport import RankLost

__all__ = [
    "Layout", "Plan", "RankLost", "Shard", "attention", "balanced", "by_document", "contiguous",
    "decode", "generate", "head_tail", "look", "plan", "plan_model", "shard", "sharded", "unshard",
]  # fmt: skip
