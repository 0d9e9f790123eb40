"""The embedded pair `tiny-python`: corpus, tokenizer, target, draft, evaluation, export."""
