"""Inspect a running model: record its attention (`watch`, `report`), change it and measure the
effect (`intervene`, `effects`)."""
