"""What the keys of a head have in common."""
