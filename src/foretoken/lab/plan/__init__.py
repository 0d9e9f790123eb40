"""`foretoken plan`: what speculation would buy, from costs of steps and an acceptance."""
