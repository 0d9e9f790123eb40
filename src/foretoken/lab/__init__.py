"""The laboratory: commands that measure, audit, predict and train, built on the engine."""
