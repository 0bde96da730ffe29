"""Follow a model while it runs: its layers, texts, copies and positions."""
