"""Steps 1 and 6: the HTTP process. Plain Python; what it needs of SGLang comes through `engine.Engine`."""
