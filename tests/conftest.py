"""Small tensors gain nothing from threads, and on a busy machine they lose much. What torch
compiles is kept apart from what others compile, perhaps for another version of the core."""

import os
import tempfile

import torch

torch.set_num_threads(1)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="clearhead-tests-")
