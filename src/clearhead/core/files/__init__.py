"""Write files in one move, and results as files and as tables."""
