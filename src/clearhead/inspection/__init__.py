"""A model while it runs: where its attention looks (`watch`, reports), and what that causes
(`intervene`, `effects`)."""
