"""What follows from the matrices of a model."""
