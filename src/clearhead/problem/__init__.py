"""The question: checked once (`check`), then a `Problem` and its tensors, which engines answer."""
