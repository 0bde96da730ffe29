"""Check the arguments of a call, hold them as a `Problem`, and compute softmax in parts."""
