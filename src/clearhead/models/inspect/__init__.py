"""Watch the attention calls of a model, and edit them."""
