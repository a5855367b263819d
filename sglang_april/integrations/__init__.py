"""Batch-quota rounds for other training frameworks. Importing these modules imports neither SGLang nor a trainer."""
