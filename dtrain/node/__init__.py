"""What runs on a node: standard library only, Python 3.9; imports nothing of the launching side."""
