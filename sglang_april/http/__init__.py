"""The HTTP process. Plain Python: `frontend.Frontend` is its interface to SGLang."""
