"""Small tensors gain nothing from threads, and on a busy machine they lose much."""

import torch

torch.set_num_threads(1)
