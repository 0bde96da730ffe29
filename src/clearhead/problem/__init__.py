"""A problem, what a call asks of attention: its checks, its tensors, and the arithmetic of rows."""
