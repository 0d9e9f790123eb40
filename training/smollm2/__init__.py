"""An EAGLE-3 head for SmolLM2-135M-Instruct: prompts, texts, training, evaluation."""
