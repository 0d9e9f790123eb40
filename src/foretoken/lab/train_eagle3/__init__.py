"""Train an EAGLE-3 head for a target: `foretoken train-eagle3`, and its parts for scripts."""
