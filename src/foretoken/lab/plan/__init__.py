"""`foretoken plan`: the gain from speculation, predicted from costs of steps and an acceptance."""
