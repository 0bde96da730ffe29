"""What each head causes."""
